"""The `anthropic` package as its users call it."""

from __future__ import annotations

from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")

HI: list[Any] = [{"role": "user", "content": "Say hello."}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # the package has no such parameter any more
ONE_CALL: dict[str, Any] = {"type": "any", "disable_parallel_tool_use": True}
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message(client: Any, model: str) -> None:
    message = client.messages.create(model=model, max_tokens=16, messages=HI, system="Be brief.", **GREEDY)
    assert message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.output_tokens > 0
    assert message._request_id == message.id


def test_a_message_streamed_is_the_same(client: Any, model: str) -> None:
    asked = {"model": model, "max_tokens": 16, "messages": HI, **GREEDY}
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**asked)
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_raw_events(client: Any, model: str) -> None:
    events = list(client.messages.create(model=model, max_tokens=4, messages=HI, stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_stop_sequences(client: Any, model: str) -> None:
    prompt = [{"role": "user", "content": "Count: 1, 2, 3"}, {"role": "assistant", "content": "1, 2, 3, 4,"}]
    message = client.messages.create(model=model, max_tokens=64, messages=prompt, stop_sequences=["7"], **GREEDY)
    if message.stop_reason == "stop_sequence":
        assert message.stop_sequence == "7"
    assert "7" not in message.content[0].text


def test_a_loop_of_tools(client: Any, model: str) -> None:
    asked = {"model": model, "max_tokens": 100, "tools": [TOOL], **GREEDY}
    question = {"role": "user", "content": "What is the weather in Paris?"}
    called = client.messages.create(messages=[question], tool_choice=ONE_CALL, **asked)
    assert called.stop_reason == "tool_use"
    [use, *_] = [block for block in called.content if block.type == "tool_use"]
    assert (use.name, use.input["city"] in ("Paris", "Rome")) == ("get_weather", True)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny, 22 degrees."}
    turns = [question, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=turns, tool_choice={"type": "none"}, **asked)
    assert last.content[0].type == "text"


def test_streamed_tool_calls_add_up(client: Any, model: str) -> None:
    with client.messages.stream(
        model=model, max_tokens=100, messages=HI, tools=[TOOL], tool_choice=ONE_CALL, **GREEDY
    ) as stream:
        message = stream.get_final_message()
    [use, *_] = [block for block in message.content if block.type == "tool_use"]
    assert use.input["city"] in ("Paris", "Rome")


def test_tokens_are_counted(client: Any, model: str) -> None:
    counted = client.messages.count_tokens(model=model, messages=HI).input_tokens
    usage = client.messages.create(model=model, max_tokens=1, messages=HI).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_are_the_clients_own(client: Any, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=1, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model=model, max_tokens=1, messages=HI, extra_body={"temperature": 11})
