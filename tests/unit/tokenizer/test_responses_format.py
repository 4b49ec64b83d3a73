"""OpenAI's Responses: what a body means as a chat, and every event of an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.runtime.config import Settings
from services.tokenizer.answer_parts import (
    AnswerDelta,
    AnswerEnd,
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)
from services.tokenizer.api_error import ApiError, Code, bad_field, unavailable
from services.tokenizer.responses_chat import chat_of
from services.tokenizer.responses_format import ResponsesFormat
from services.tokenizer.responses_schema import ResponsesBody, parse_responses
from services.wire.finish import Finish

USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 5,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 8},
}
Json = dict[str, Any]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
STOPPED = AnswerEnd(Finish.STOP_TOKEN)


def parsed(**body: object) -> ResponsesBody:
    return parse_responses({"input": "hi", **body}, Settings())[0]


def chat(**body: object) -> Json:
    return chat_of(parsed(**body)).fields


def fmt(**body: object) -> ResponsesFormat:
    return ResponsesFormat("resp_0a", 1, "m", parsed(**body))


def stream(deltas: Sequence[AnswerDelta], end: AnswerEnd = STOPPED) -> list[Json]:
    """All events of an answer: numbered without a gap, named as their type says, each as the client library has it."""
    made = fmt()
    data = made.opening(0) + b"".join(made.delta(0, delta) for delta in deltas)
    return events(data + made.finish(0, end) + made.ending(USAGE))


def events(data: bytes) -> list[Json]:
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        name, value = event.split("\n")
        found.append(json.loads(value.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_json(value.removeprefix("data: "), strict=False)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_the_events_of_a_text() -> None:
    found = stream([AnswerDelta([Text("你")]), AnswerDelta([Text("好👋\u2029")])])
    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert found[4] == {
        "type": "response.output_text.delta", "sequence_number": 4, "item_id": "msg_0a0000", "output_index": 0,
        "content_index": 0, "delta": "你", "logprobs": [],
    }  # fmt: skip
    assert found[6]["text"] == "你好👋\u2029"
    last = Response.model_validate(found[-1]["response"])
    assert (last.output_text, last.status) == ("你好👋\u2029", "completed")
    assert last.usage is not None
    assert (last.usage.input_tokens, last.usage.input_tokens_details.cached_tokens) == (12, 8)


def test_thoughts_texts_and_calls_are_items_in_order_streamed_and_not() -> None:
    deltas = [
        AnswerDelta([Reasoning("hm"), Text("Look: ")]),
        AnswerDelta([ToolCallStart(0, "c1", "f"), ToolCallArguments(0, '{"a":')]),
        AnswerDelta([ToolCallArguments(0, "1}"), ToolCallStart(1, "c2", "g"), ToolCallArguments(1, "{}")]),
    ]
    end = AnswerEnd(Finish.STOP_TOKEN, has_tool_calls=True)
    found = stream(deltas, end)
    whole = json.loads(fmt().body([deltas], [end], USAGE))
    assert found[-1]["response"] == whole
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert [item.get("arguments") for item in whole["output"]] == [None, None, '{"a":1}', "{}"]
    done = [event for event in found if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == whole["output"]
    fragments = [event["delta"] for event in found if event["type"] == "response.function_call_arguments.delta"]
    assert fragments == ['{"a":', "1}", "{}"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]


def test_an_answer_that_was_cut_is_incomplete() -> None:
    found = stream([AnswerDelta([Text("a")])], AnswerEnd(Finish.LENGTH))
    assert found[-1]["type"] == "response.incomplete"
    response = found[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == found[-2]["item"]["status"] == "incomplete"
    whole = json.loads(fmt().body([[AnswerDelta([Text("a")])]], [AnswerEnd(Finish.LENGTH)], USAGE))
    assert whole == response


@pytest.mark.parametrize("arguments", ["", '{"a": "'])
@pytest.mark.parametrize("finish", [Finish.STOP_STRING, Finish.STOP_TOKEN])
def test_a_call_that_was_cut_is_incomplete_and_so_is_the_response(finish: Finish, arguments: str) -> None:
    whole_call: list[Part] = [ToolCallStart(0, "c1", "f"), ToolCallArguments(0, "{}"), ToolCallStart(1, "c2", "f")]
    more: list[Part] = [ToolCallArguments(1, arguments)] if arguments else []
    deltas = [AnswerDelta([*whole_call, *more])]
    end = AnswerEnd(finish, has_tool_calls=True, has_cut_call=True)
    found = stream(deltas, end)
    assert found[-1]["type"] == "response.incomplete"
    response = found[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", None)
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    assert json.loads(fmt().body([deltas], [end], USAGE)) == response


def test_an_answer_without_text_has_no_items() -> None:
    assert json.loads(fmt().body([[]], [STOPPED], USAGE))["output"] == []
    assert [event["type"] for event in stream([])] == [
        "response.created", "response.in_progress", "response.completed",
    ]  # fmt: skip


def test_sse_05_an_error_after_the_first_byte_ends_the_stream() -> None:
    made = fmt()
    data = made.opening(0) + made.delta(0, AnswerDelta([Text("half")])) + made.error(unavailable(Code.DRAINING, "bye"))
    last = events(data)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "draining: bye"}
    assert last["response"]["output"][0]["content"][0]["text"] == "half"


def test_a_response_repeats_its_request() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    made = fmt(instructions="kurz", tools=[tool], tool_choice="required", temperature=0.5, max_output_tokens=7,
               text={"format": {"type": "json_schema", "name": "n", "schema": {}}}, store=True)  # fmt: skip
    whole = json.loads(made.body([[]], [STOPPED], USAGE))
    Response.model_validate(whole)
    assert whole["tools"] == [{**tool, "strict": None}]
    assert (whole["instructions"], whole["tool_choice"], whole["store"]) == ("kurz", "required", False)
    assert whole["text"] == {"format": {"type": "json_schema", "name": "n", "schema": {}}}


def test_items_become_messages() -> None:
    items: list[Json] = [
        {"role": "user", "content": "Wie?"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Moment"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"ort":"北京"}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "gut"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "👋"}]},
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"role": "developer", "content": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]},
    ]  # fmt: skip
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"ort":"北京"}'}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert chat(instructions="I", input=items)["messages"] == [
        {"role": "system", "content": "I"},
        {"role": "user", "content": "Wie?"},
        {"role": "assistant", "content": "Moment", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "gut"},
        {"role": "tool", "tool_call_id": "c2", "content": "👋"},
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"role": "developer", "content": "xy"},
    ]


def test_the_output_of_an_answer_can_be_sent_back_as_input() -> None:
    deltas = [AnswerDelta([Reasoning("hm"), Text("ja"), ToolCallStart(0, "c", "f"), ToolCallArguments(0, "{}")])]
    whole = json.loads(fmt().body([deltas], [STOPPED], USAGE))
    body, ignored = parse_responses({"input": [{"role": "user", "content": "?"}, *whole["output"]]}, Settings())
    assert ignored.names == ()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert chat_of(body).messages[1] == {
        "role": "assistant", "content": "ja", "reasoning_content": "hm", "tool_calls": [call],
    }  # fmt: skip


def test_fields_become_those_of_a_chat() -> None:
    fields = chat(
        max_output_tokens=7,
        seed=3,
        tools=[{"type": "function", "name": "f", "parameters": {}, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
    )
    del fields["messages"], fields["model"]
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert fields == {
        "max_completion_tokens": 7,
        "seed": 3,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": schema},
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
    ],
)
def test_wrong_fields_are_named(body: Json, param: str) -> None:
    with pytest.raises(ApiError) as raised:
        chat(**body)
    assert raised.value.param is not None
    assert raised.value.param.replace("[...]", "[0]") == param


def test_errors_of_the_chat_are_told_in_the_clients_words() -> None:
    words = chat_of(parsed(instructions="i", max_output_tokens=3, text={"format": {"type": "json_object"}}))
    named = {
        "messages[0].content": "instructions",
        "messages[1].content": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema.schema": "text.format.schema",
    }
    assert {param: words.in_clients_words(bad_field(param, "x")).param for param in named} == named
