// The npm package `openai`: chat whole and streamed, tools, responses, embeddings.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.MODEL;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const asked = { model, messages, max_tokens: 32, temperature: 0 };

const whole = await client.chat.completions.create(asked);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);
assert.ok(whole.usage.completion_tokens > 0);

const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
const called = await client.chat.completions.create({ ...asked, max_tokens: 100, tools: [tool], tool_choice: "required" });
const call = called.choices[0].message.tool_calls[0];
assert.ok(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));

const response = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 32, temperature: 0 });
assert.ok(response.output_text.length > 0);
const types = [];
for await (const event of await client.responses.create({ model, input: "Hi", max_output_tokens: 8, stream: true })) {
  types.push(event.type);
}
assert.equal(types[0], "response.created");
assert.ok(["response.completed", "response.incomplete"].includes(types.at(-1)));

const embedding = await client.embeddings.create({ model, input: "a cat" });
assert.ok(embedding.data[0].embedding.length > 100);

await assert.rejects(client.chat.completions.create({ ...asked, temperature: 11 }), OpenAI.BadRequestError);
