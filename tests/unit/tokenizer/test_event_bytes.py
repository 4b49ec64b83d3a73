"""The bytes of events, and a stream that merges what a slow client does not take, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, AnswerFormat, Text
from services.tokenizer.answer_sinks import KEEP_ALIVE_S, MAX_PENDING_CHARACTERS, EventStream
from services.tokenizer.api_error import ApiError
from services.tokenizer.chat_format import ChatFormat
from services.tokenizer.completion_format import CompletionFormat
from services.tokenizer.journal import Ending, NewPart
from services.tokenizer.openai_chunks import AnswerHead
from services.tokenizer.pending_answer import PendingAnswer
from services.tokenizer.sse import json_string
from services.wire.finish import Finish

CHAT_HEAD = AnswerHead("id-1", 1_700_000_000, 'a "model" \u2028')
TEXT_HEAD = AnswerHead("id-1", 1_700_000_000, "m", has_usage_chunk=True)
CHAT, TEXT = ChatFormat(CHAT_HEAD, 3), CompletionFormat(TEXT_HEAD, 3)


class Output:
    """A connection that remembers each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_blocked = False
        self.is_cut = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def cut(self) -> None:
        self.is_cut = True

    @property
    def events(self) -> list[str]:
        return b"".join(self.writes).decode().split("\n\n")[:-1]


def stream_of(answer_format: AnswerFormat, num_answers: int = 1) -> EventStream:
    return EventStream(answer_format, [PendingAnswer() for _ in range(num_answers)])


def news(text: str) -> NewPart:
    return NewPart(text, [1], ())


def delta(text: str) -> AnswerDelta:
    return AnswerDelta((Text(text),))


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(in_time())


@given(st.text())
def test_sse_13_any_text_is_one_line_and_comes_back_exactly(text: str) -> None:
    encoded = json_string(text).decode()
    assert len(encoded.splitlines()) == 1
    assert json.loads(encoded) == text


@given(st.text(max_size=20))
def test_sse_13_an_event_is_data_one_line_and_a_blank_one(text: str) -> None:
    for answer_format, head in ((CHAT, CHAT_HEAD), (TEXT, TEXT_HEAD)):
        event = answer_format.delta(2, delta(text)).decode()
        assert event.startswith("data: ")
        assert event.endswith("\n\n")
        assert len(event.splitlines()) == 2
        value = json.loads(event.removeprefix("data: "))
        choice = value["choices"][0]
        assert (value["id"], value["created"], value["model"]) == (head.answer_id, head.created, head.model)
        assert choice["index"] == 2
        assert (choice["delta"] == {"content": text}) if head is CHAT_HEAD else (choice["text"] == text)
        assert choice["finish_reason"] is None


def test_sse_13_content_that_looks_like_a_field() -> None:
    text = "a\ndata: x\n\n\u2028b"
    event = CHAT.delta(0, delta(text))
    assert event.count(b"\n") == 2
    assert b"\xe2\x80\xa8" not in event
    assert json.loads(event[6:])["choices"][0]["delta"]["content"] == text


def test_sse_16_a_blocked_client_gets_its_text_merged_and_loses_none() -> None:
    async def test() -> None:
        stream, output = stream_of(TEXT, 2), Output()
        stream.open(output)
        output.is_blocked = True
        for number in range(100):
            stream.add(number % 2, news(f"{number} "))
            stream.flush()
        stream.end(1, Ending(Finish.LENGTH))
        stream.flush()
        assert output.writes == []
        output.is_blocked = False
        stream.flush()
        assert len(output.writes) == 1
        assert len(output.events) == 3
        texts = [json.loads(event[6:])["choices"][0]["text"] for event in output.events]
        assert texts[0].split() == [str(number) for number in range(0, 100, 2)]
        assert texts[1].split() == [str(number) for number in range(1, 100, 2)]
        stream.end(0, Ending(Finish.STOP_TOKEN))
        stream.flush()
        assert await stream.done is None
        assert output.events[-1] == "data: [DONE]"

    run(test)


def test_sse_16_what_a_client_leaves_lying_is_bounded() -> None:
    async def test() -> None:
        stream, output = stream_of(TEXT), Output()
        stream.open(output)
        output.is_blocked = True
        stream.add(0, news("x" * MAX_PENDING_CHARACTERS))
        stream.flush()
        assert not output.is_cut
        stream.add(0, news("x"))
        stream.flush()
        assert output.is_cut

    run(test)


def test_text_that_came_before_the_head_goes_out_behind_it_in_order() -> None:
    async def test() -> None:
        stream, output = stream_of(CHAT), Output()
        stream.add(0, news("你"))
        stream.flush()
        stream.add(0, news("好"))
        stream.end(0, Ending(Finish.STOP_STRING))
        stream.flush()
        stream.open(output)
        deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in output.events[:-1]]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "你好"}, {}]
        assert await stream.done is None

    run(test)


def test_sse_05_an_error_comes_after_the_text_and_ends_the_stream_once() -> None:
    async def test() -> None:
        stream, output = stream_of(TEXT, 2), Output()
        stream.open(output)
        stream.add(0, news("so far"))
        error = ApiError(500, "broken", code="internal_error")
        stream.fail(error)
        stream.fail(ApiError(503, "other", code="other"))
        stream.add(1, news("late"))
        stream.flush()
        assert await stream.done is error
        assert len(output.events) == 3
        assert json.loads(output.events[0][6:])["choices"][0]["text"] == "so far"
        assert json.loads(output.events[1][6:])["error"]["message"] == "broken"
        assert output.events[2] == "data: [DONE]"

    run(test)


@pytest.mark.parametrize("answer_format", [CHAT, TEXT])
def test_a_comment_is_written_when_nothing_else_was_for_ten_seconds(answer_format: AnswerFormat) -> None:
    async def test() -> None:
        stream, output = stream_of(answer_format), Output()
        stream.keep_alive(1e9)
        stream.open(output)
        opened_s, num_written = stream._last_write_s, len(output.writes)
        assert num_written == (answer_format is CHAT)
        stream.keep_alive(opened_s + KEEP_ALIVE_S - 0.1)
        assert len(output.writes) == num_written
        stream.keep_alive(opened_s + KEEP_ALIVE_S)
        assert output.writes[num_written:] == [b": keep-alive\n\n"]
        output.is_blocked = True
        stream.keep_alive(1e9)
        assert len(output.writes) == num_written + 1

    run(test)


def test_a_finished_stream_writes_nothing_more() -> None:
    async def test() -> None:
        stream, output = stream_of(CHAT), Output()
        stream.open(output)
        stream.end(0, Ending(Finish.LENGTH))
        stream.flush()
        num_writes = len(output.writes)
        stream.fail(ApiError(500, "late", code="late"))
        stream.flush()
        stream.keep_alive(1e9)
        assert len(output.writes) == num_writes
        assert await stream.done is None

    run(test)


@pytest.mark.parametrize("finish", [Finish.STOP_TOKEN, Finish.STOP_STRING, Finish.LENGTH])
def test_sse_18_the_reason_tells_a_limit_from_a_stop(finish: Finish) -> None:
    event = json.loads(CHAT.finish(0, AnswerEnd(finish))[6:])
    assert event["choices"][0]["finish_reason"] == ("length" if finish is Finish.LENGTH else "stop")
    assert event["choices"][0]["delta"] == {}
