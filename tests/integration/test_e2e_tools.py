"""Tools with the real model: a call that must come is a valid call, however small the model and whatever it draws."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage

from tests.integration.client import CHAT, Client, Json

pytestmark = [pytest.mark.slow, pytest.mark.surface, pytest.mark.timeout(600)]

WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 24},
                "unit": {"type": "string", "enum": ["celsius", "华氏"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "unit"],
        },
    },
}
NOW: Json = {"type": "function", "function": {"name": "now", "description": "The time"}}
TOOLS = [WEATHER, NOW]
QUESTION = [{"role": "user", "content": "What is the weather in Paris? 你好"}]


def assert_valid(calls: list[Json]) -> None:
    """Every call is of a declared function, with arguments that fit its schema."""
    assert calls
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "now":
            assert arguments == {}
            continue
        assert call["function"]["name"] == "get_weather"
        assert {"city", "unit"} <= arguments.keys() <= {"city", "unit", "days"}
        assert isinstance(arguments["city"], str)
        assert arguments["unit"] in ("celsius", "华氏")
        assert 1 <= arguments.get("days", 1) <= 7


def message_of(client: Client, **body: Any) -> tuple[Json, str]:
    response = client.request("POST", CHAT, {"messages": QUESTION, "max_tokens": 200, **body})
    assert response.status == 200, response.body
    choice = response.json()["choices"][0]
    return choice["message"], choice["finish_reason"]


@pytest.mark.parametrize("max_tokens", [1, 8, 12, 60])
def test_where_a_call_that_must_come_is_cut_no_markup_is_content(quick: Client, max_tokens: int) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        message, reason = message_of(quick, tools=TOOLS, tool_choice=choice, max_tokens=max_tokens)
        assert not message["content"]
        assert reason in ("length", "tool_calls")
        assert max_tokens > 1 or "tool_calls" not in message


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_str_07_a_required_call_is_a_valid_one(quick: Client, seed: int) -> None:
    message, reason = message_of(
        quick, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed
    )
    assert reason == "tool_calls"
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1
    assert_valid(message["tool_calls"])


def test_str_07_a_named_function_is_called_and_no_other(quick: Client) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    message, reason = message_of(
        quick, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, temperature=1, seed=5
    )
    assert (message["content"], reason) == (None, "tool_calls")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
    assert_valid(message["tool_calls"])
    unknown = {"type": "function", "function": {"name": "then"}}
    body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": unknown}
    assert quick.refused(CHAT, body)["param"] == "tool_choice.function.name"


def test_str_07_tools_that_may_be_called_or_not(quick: Client) -> None:
    for choice in ("auto", "none", None):
        message, reason = message_of(quick, tools=TOOLS, tool_choice=choice, max_tokens=4, temperature=0)
        assert message["role"] == "assistant"
        assert reason in ("length", "stop")
    message, _ = message_of(quick, tools=[], tool_choice="auto", max_tokens=1, temperature=0)
    assert "tool_calls" not in message


def test_str_03_a_streamed_call_adds_up_to_the_one_in_a_body(quick: Client) -> None:
    fields: Json = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    message_of(quick, **fields, max_tokens=1)  # both that follow find the prompt in the cache: they round alike
    message, _ = message_of(quick, **fields)
    sdk: Any = OpenAI(base_url=f"{quick.server.url}/v1", api_key="x", max_retries=0)
    with sdk.chat.completions.create(
        model=sdk.models.list().data[0].id, messages=QUESTION, max_tokens=200, stream=True, **fields
    ) as stream:
        starts: list[str | None] = []
        fragments: list[str] = []
        reasons: list[str] = []
        for chunk in stream:
            choice = chunk.choices[0]
            assert not choice.delta.content
            for call in choice.delta.tool_calls or []:
                assert call.index == 0
                assert call.function is not None
                starts += [call.function.name] if call.id else []
                fragments.append(call.function.arguments or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []
    function = message["tool_calls"][0]["function"]
    assert starts == [function["name"]]
    assert "".join(fragments) == function["arguments"]
    assert len(fragments) > 3
    assert reasons == ["tool_calls"]


def test_a_tool_dialogue_goes_on_with_what_the_client_library_sends_back(quick: Client) -> None:
    sdk: Any = OpenAI(base_url=f"{quick.server.url}/v1", api_key="x", max_retries=0)
    model = sdk.models.list().data[0].id
    fields: Json = {"model": model, "tools": TOOLS, "max_tokens": 100, "temperature": 0}
    first = (
        sdk.chat.completions.create(messages=QUESTION, tool_choice="required", parallel_tool_calls=False, **fields)
        .choices[0]
        .message
    )
    assert isinstance(first, ChatCompletionMessage)
    assert first.tool_calls
    answer = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "18 degrees ☀"}
    second = sdk.chat.completions.with_raw_response.create(
        messages=[*QUESTION, first, answer], **{**fields, "max_tokens": 8}
    )
    assert second.status_code == 200
    assert "x-ignored-fields" not in second.headers
    assert second.parse().choices[0].message.content is not None


def test_the_older_spelling_with_the_real_model(quick: Client) -> None:
    functions = [tool["function"] for tool in TOOLS]
    message, reason = message_of(
        quick, functions=functions, function_call={"name": "get_weather"}, temperature=1, seed=3
    )
    assert reason == "function_call"
    assert_valid([{"function": message["function_call"]}])


def test_strict_functions_among_free_text(quick: Client) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    opened = {"role": "assistant", "content": "I will look.\n<tool_call>"}
    body: Json = {"messages": [*QUESTION, opened], "continue_final_message": True, "tools": [strict], "max_tokens": 8}
    assert quick.request("POST", CHAT, body).status == 200
    message, _ = message_of(quick, tools=[strict], max_tokens=16, temperature=1, seed=1)
    assert message["content"] or message["tool_calls"]
