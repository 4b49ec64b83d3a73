"""The `openai` package as its users call it."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai")
BaseModel: Any = pytest.importorskip("pydantic").BaseModel

HI: list[Any] = [{"role": "user", "content": "Say hello."}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Verdict(BaseModel):  # type: ignore[misc]
    """What the model must fill in."""

    mood: Literal["good", "bad"]
    is_sure: bool


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: Any, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=HI, max_tokens=16, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_chat_streamed_is_the_same(client: Any, model: str) -> None:
    asked = {"model": model, "messages": HI, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens > 0


def test_the_streaming_helper(client: Any, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=HI, max_tokens=64, temperature=0) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(texts) == final.choices[0].message.content


def test_log_probabilities(client: Any, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=HI, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in content)
    assert all(token.top_logprobs[0].token == token.token for token in content)


def test_completions(client: Any, model: str) -> None:
    answer = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=8, temperature=0)
    assert answer.choices[0].text.startswith(" 5, 6")
    chunks = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_parse_with_a_pydantic_model(client: Any, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=HI, response_format=Verdict, max_tokens=100, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_a_loop_of_tools(client: Any, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools: list[Any] = [{"type": "function", "function": WEATHER}]
    asked = {"model": model, "tools": tools, "temperature": 0, "max_tokens": 100}
    message = client.chat.completions.create(messages=messages, tool_choice="required", **asked).choices[0].message
    [call, *_] = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 22 degrees."}]
    last = client.chat.completions.create(messages=messages, tool_choice="none", **asked).choices[0]
    assert last.message.content
    assert not last.message.tool_calls


def test_streamed_tool_calls_add_up(client: Any, model: str) -> None:
    tools: list[Any] = [{"type": "function", "function": WEATHER}]
    with client.chat.completions.stream(
        model=model,
        messages=HI,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    ) as stream:  # fmt: skip
        stream.until_done()
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")


def test_responses(client: Any, model: str) -> None:
    answer = client.responses.create(model=model, input="Say hello.", max_output_tokens=16, temperature=0)
    assert answer.output_text
    assert answer.usage.output_tokens > 0
    items = [{"role": "user", "content": "Say hello."}, *answer.output, {"role": "user", "content": "Again."}]
    again = client.responses.create(model=model, input=items, max_output_tokens=4, temperature=0)
    assert again.usage.input_tokens > answer.usage.input_tokens


def test_responses_streamed(client: Any, model: str) -> None:
    asked = {"model": model, "input": "Say hello.", "max_output_tokens": 64, "temperature": 0}
    with client.responses.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == client.responses.create(**asked).output_text


def test_responses_parse_and_tools(client: Any, model: str) -> None:
    answer = client.responses.parse(
        model=model, input="Is it good?", text_format=Verdict, max_output_tokens=100, temperature=0
    )
    assert isinstance(answer.output_parsed, Verdict)
    tool = {"type": "function", "strict": True, **WEATHER}
    called = client.responses.create(
        model=model, input="Weather in Rome?", tools=[tool], tool_choice="required", max_output_tokens=100,
        temperature=0,
    )  # fmt: skip
    [call] = [item for item in called.output if item.type == "function_call"][:1]
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


def test_embeddings(client: Any, model: str) -> None:
    """The client asks for base64 by itself and decodes it."""
    answer = client.embeddings.create(model=model, input=["a cat", "a dog"])
    first, second = (item.embedding for item in answer.data)
    plain = client.embeddings.create(model=model, input="a cat", encoding_format="float").data[0].embedding
    assert first == pytest.approx(plain, abs=1e-5)
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-3)
    assert first != second


def test_models(client: Any, model: str) -> None:
    assert [entry.id for entry in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_errors_are_the_clients_own(client: Any, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=model, messages=HI, temperature=11)
    assert wrong.value.param == "temperature"
