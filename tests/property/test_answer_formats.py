"""Whatever parts an answer comes in, cut anywhere, its events put together are its body: messages and responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

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
from services.tokenizer.messages_format import MessagesFormat
from services.tokenizer.responses_format import ResponsesFormat
from services.tokenizer.responses_schema import parse_responses
from services.wire.finish import Finish

Json = dict[str, Any]
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 2},
}
TEXTS = st.text(st.sampled_from('aé你👋\u2028\x85\n"\\ '), min_size=1, max_size=4)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerDelta]:
    """Texts, thoughts and whole calls in any order, in deltas cut anywhere."""
    parts: list[Part] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thought", "call"]), max_size=6)):
        if kind == "call":
            arguments = json.dumps({"a": draw(TEXTS)}, ensure_ascii=False)
            cut = draw(st.integers(1, len(arguments) - 1))
            parts.append(ToolCallStart(num_calls, f"c{num_calls}", "f"))
            parts += [ToolCallArguments(num_calls, piece) for piece in (arguments[:cut], arguments[cut:])]
            num_calls += 1
        else:
            parts.append(Text(draw(TEXTS)) if kind == "text" else Reasoning(draw(TEXTS)))
    deltas: list[AnswerDelta] = []
    while parts:
        size = draw(st.integers(1, len(parts)))
        deltas.append(AnswerDelta(parts[:size]))
        parts = parts[size:]
    return deltas


ENDS = st.sampled_from(
    [AnswerEnd(Finish.STOP_TOKEN), AnswerEnd(Finish.LENGTH), AnswerEnd(Finish.STOP_STRING, stop="x")]
)


def events_of(
    answer_format: MessagesFormat | ResponsesFormat, deltas: Sequence[AnswerDelta], end: AnswerEnd
) -> list[Json]:
    data = answer_format.opening(0) + b"".join(answer_format.delta(0, delta) for delta in deltas)
    data += answer_format.finish(0, end) + answer_format.ending(USAGE)
    lines = [event.split(b"\n") for event in data.split(b"\n\n")[:-1]]
    assert all(len(event) == 2 for event in lines), "an event is a name and one line of data"
    return [json.loads(value.removeprefix(b"data: ")) for _, value in lines]


@given(answers(), ENDS)
def test_a_stream_of_messages_puts_together_its_body(deltas: list[AnswerDelta], end: AnswerEnd) -> None:
    body = json.loads(MessagesFormat("msg_1", "m", 5).body([deltas], [end], USAGE))
    message: Json = {}
    arguments: dict[int, str] = {}
    for event in events_of(MessagesFormat("msg_1", "m", 5), deltas, end):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
                if name is None:
                    arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
                else:
                    block[name] += delta[name]
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    assert message == body


@given(answers(), ENDS)
def test_a_stream_of_responses_puts_together_its_body(deltas: list[AnswerDelta], end: AnswerEnd) -> None:
    request, _ = parse_responses({"input": "x"}, Settings())
    body = json.loads(ResponsesFormat("resp_1", 1, "m", request).body([deltas], [end], USAGE))
    events = events_of(ResponsesFormat("resp_1", 1, "m", request), deltas, end)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == body
    texts: dict[int, str] = {}
    done: list[Json] = []
    for event in events:
        if event["type"].endswith(".delta"):
            assert event["output_index"] == len(done), "one item after the other"
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
        elif event["type"] == "response.output_item.done":
            done.append(event["item"])
    assert [{**item, "status": None} for item in done] == [{**item, "status": None} for item in body["output"]]
    assert [texts[index] for index in range(len(done))] == [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in body["output"]
    ]
