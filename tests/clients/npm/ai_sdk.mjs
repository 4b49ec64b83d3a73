// The npm packages `ai` and `@ai-sdk/openai-compatible`: text whole and streamed, an object of a schema, a tool.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const provider = createOpenAICompatible({
  name: "tokenway",
  baseURL: process.env.BASE_URL,
  apiKey: "none",
  includeUsage: true,
});
const model = provider.chatModel(process.env.MODEL);
const asked = { model, prompt: "Say hello.", maxOutputTokens: 32, temperature: 0, maxRetries: 0 };

const whole = await generateText(asked);
assert.ok(whole.text.length > 0);
const stream = streamText(asked);
let text = "";
for await (const part of stream.textStream) {
  text += part;
}
assert.equal(text, whole.text);
assert.ok((await stream.usage).outputTokens > 0);

const weather = tool({
  description: "The weather in a city",
  inputSchema: jsonSchema({
    type: "object",
    properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  }),
});
const called = await generateText({ ...asked, maxOutputTokens: 100, tools: { weather }, toolChoice: "required" });
assert.equal(called.toolCalls[0].toolName, "weather");
assert.ok(["Paris", "Rome"].includes(called.toolCalls[0].input.city));

const embedder = provider.textEmbeddingModel(process.env.MODEL);
const { embeddings } = await embedder.doEmbed({ values: ["a cat"] });
assert.ok(embeddings[0].length > 100);
