"""Anthropic's Messages: what a body means as a chat, and every byte of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.runtime.config import Settings
from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, Reasoning, Text, ToolCallArguments, ToolCallStart
from services.tokenizer.api_error import ApiError, Code, bad_field, unavailable
from services.tokenizer.messages_format import MessagesFormat, messages_error_body
from services.tokenizer.messages_schema import COUNT_FORM, MESSAGES_FORM, chat_of
from services.wire.finish import Finish

USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 5,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 8},
}
Json = dict[str, Any]


def fmt() -> MessagesFormat:
    return MessagesFormat("msg_01", "m", 12)


def events(data: bytes) -> list[Json]:
    """The events of a stream; each is two lines whose names agree."""
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        name, value = event.split("\n")
        found.append(json.loads(value.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def chat(**body: object) -> Json:
    whole = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **body}
    parsed, _ = MESSAGES_FORM.parse(whole, Settings())
    return chat_of(parsed).fields


def test_the_bytes_of_a_short_stream() -> None:
    made = fmt()
    data = made.opening(0) + made.delta(0, AnswerDelta([Text("你好\u2028")])) + made.delta(0, AnswerDelta([Text("👋")]))
    data += made.finish(0, AnswerEnd(Finish.STOP_TOKEN)) + made.ending(USAGE)
    assert data.decode() == (
        'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_01","type":"message",'
        '"role":"assistant","model":"m","content":[],"stop_reason":null,"stop_sequence":null,'
        '"usage":{"input_tokens":12,"output_tokens":0}}}\n\n'
        'event: ping\ndata: {"type":"ping"}\n\n'
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        '"content_block":{"type":"text","text":""}}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"你好\\u2028"}}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"👋"}}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        '"usage":{"input_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":8,"output_tokens":5}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )


def test_thoughts_texts_and_calls_are_blocks_in_order() -> None:
    parts = [
        AnswerDelta([Reasoning("hm"), Text("I "), Text("look.")]),
        AnswerDelta([ToolCallStart(0, "c1", "f"), ToolCallArguments(0, '{"a":')]),
        AnswerDelta([ToolCallArguments(0, "1}"), ToolCallStart(1, "c2", "g"), ToolCallArguments(1, "{}")]),
    ]
    end = AnswerEnd(Finish.STOP_TOKEN, has_tool_calls=True)
    made = fmt()
    stream = events(b"".join(made.delta(0, delta) for delta in parts) + made.finish(0, end))
    starts = [event["content_block"] for event in stream if event["type"] == "content_block_start"]
    assert [(start["type"], start.get("name")) for start in starts] == [
        ("thinking", None), ("text", None), ("tool_use", "f"), ("tool_use", "g"),
    ]  # fmt: skip
    assert [event["index"] for event in stream if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    body = json.loads(fmt().body([parts], [end], USAGE))
    assert body["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
    ]
    assert body["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (AnswerEnd(Finish.STOP_TOKEN), "end_turn", None),
        (AnswerEnd(Finish.STOP_TOKEN, stop=7), "end_turn", None),
        (AnswerEnd(Finish.LENGTH, has_tool_calls=True), "max_tokens", None),
        (AnswerEnd(Finish.STOP_STRING, stop="。"), "stop_sequence", "。"),
        (AnswerEnd(Finish.STOP_TOKEN, has_tool_calls=True), "tool_use", None),
        (AnswerEnd(Finish.STOP_TOKEN, has_tool_calls=True, has_cut_call=True), "end_turn", None),
    ],
)
def test_why_an_answer_ended(end: AnswerEnd, reason: str, sequence: str | None) -> None:
    body = json.loads(fmt().body([[]], [end], USAGE))
    assert (body["stop_reason"], body["stop_sequence"], body["content"]) == (reason, sequence, [])


@pytest.mark.parametrize("arguments", ['{"a": "你', "{", ""])
def test_arguments_that_were_cut_off_are_given_as_they_stand(arguments: str) -> None:
    parts = [AnswerDelta([ToolCallStart(0, "c", "f"), ToolCallArguments(0, arguments)])]
    body = json.loads(fmt().body([parts], [AnswerEnd(Finish.LENGTH, True)], USAGE))
    assert body["content"][0]["input"] == {"_incomplete_json": arguments}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (bad_field("max_tokens", "is required"), "invalid_request_error"),
        (ApiError(401, "no key", code="x"), "authentication_error"),
        (ApiError(404, "no model", code="x"), "not_found_error"),
        (ApiError(405, "POST", code="x"), "invalid_request_error"),
        (ApiError(500, "id 1", code="x"), "api_error"),
        (unavailable(Code.QUEUE_FULL, "full"), "overloaded_error"),
        (unavailable(Code.BACKEND_LOST, "gone"), "api_error"),
        (unavailable(Code.ABORTED, "ended"), "api_error"),
    ],
)
def test_api_05_errors_have_anthropics_form(error: ApiError, kind: str) -> None:
    told = {"type": "error", "error": {"type": kind, "message": error.message}}
    assert json.loads(messages_error_body(error)) == told
    assert events(fmt().error(error)) == [told]


def test_a_conversation_with_calls_becomes_a_chat() -> None:
    turns: list[Json] = [
        {"role": "user", "content": [{"type": "text", "text": "Wie"}, {"type": "text", "text": "?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Moment"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"ort": "北京"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "kaputt"}],
                 "is_error": True},
                {"type": "text", "text": "Und?"},
            ],
        },
    ]  # fmt: skip
    fields = chat(system=[{"type": "text", "text": "Kurz."}], messages=turns)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"ort":"北京"}'}}
    assert fields["messages"] == [
        {"role": "system", "content": "Kurz."},
        {"role": "user", "content": "Wie?"},
        {"role": "assistant", "content": "Moment", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Error: kaputt"},
        {"role": "user", "content": "Und?"},
    ]


def test_fields_become_those_of_a_chat() -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    fields = chat(
        tools=[tool],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2048},
        stop_sequences=["a"],
        top_k=3,
        stream=True,
    )
    del fields["messages"], fields["model"]
    function = {"name": "f", "parameters": {"type": "object"}, "description": "d"}
    assert fields == {
        "max_tokens": 9,
        "stop": ["a"],
        "top_k": 3,
        "stream": True,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True},
    }


@pytest.mark.parametrize("spelling", ["output_format", "output_config"])
def test_a_format_is_told_in_either_spelling(spelling: str) -> None:
    asked = {"type": "json_schema", "schema": {"type": "object"}}
    fields = chat(**{spelling: asked if spelling == "output_format" else {"format": asked}})
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert fields["response_format"] == {"type": "json_schema", "json_schema": schema}


def test_an_answer_that_was_begun_goes_on() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once"}]
    fields = chat(messages=turns)
    assert (fields["continue_final_message"], fields["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"name": "f", "input_schema": {}, "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_format": {"type": "text"}}, "output_format.type"),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_format",
        ),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ],
)
def test_wrong_fields_are_named(body: Json, param: str) -> None:
    with pytest.raises(ApiError) as raised:
        chat(**body)
    assert raised.value.param is not None
    assert raised.value.param.replace("[...]", "[0]") == param


def test_system_messages_may_stand_between_turns() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "system", "content": [{"type": "text", "text": "b"}]}]
    assert chat(messages=turns)["messages"] == [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]


def test_errors_of_the_chat_are_told_in_the_clients_words() -> None:
    turns = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}, {"type": "text", "text": "x"}]}]
    body, _ = COUNT_FORM.parse(
        {"system": "s", "messages": turns, "tools": [{"name": "f", "input_schema": {}}]}, Settings()
    )
    words = chat_of(body)
    named = {
        "messages[0].content": "system",
        "messages[1].content": "messages[0].content[0].content",
        "messages[2]": "messages[0]",
        "messages": "messages",
        "tools[0].function.parameters.type": "tools[0].input_schema.type",
        "tools[0].function.name": "tools[0].name",
        "response_format": "response_format",
    }
    for param, expected in named.items():
        error = words.in_clients_words(bad_field(param, "is wrong"))
        assert (error.param, error.message) == (expected, f"{expected}: is wrong")
