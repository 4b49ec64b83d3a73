"""The launcher's HTTP client: the same events however the bytes are cut, and every broken answer named."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launcher.bench.answers import Answer, Expected, read_answer
from services.launcher.errors import CommandError
from services.launcher.http.connection import Connection
from services.launcher.http.response import Response, ResponseError, ResponseParser, event_data

EVENTS = [
    {"choices": [{"index": 0, "text": " 世界", "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "", "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "👋\n\n", "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    },
]
EXPECTED = Expected(3, 5)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def stream_of(events: list[object]) -> bytes:
    return b": a comment\n\n" + b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)


def chunked(body: bytes, sizes: list[int]) -> bytes:
    """The body in HTTP chunks of these sizes, over and over."""
    out, start, turn = b"", 0, 0
    while start < len(body):
        part = body[start : start + sizes[turn % len(sizes)]]
        out += b"%x\r\n%b\r\n" % (len(part), part)
        start, turn = start + len(part), turn + 1
    return out + b"0\r\n\r\n"


BODY = stream_of(list(EVENTS)) + b"data: [DONE]\n\n"


def parsed(pieces: list[bytes]) -> tuple[Response, bool]:
    response = Response(sent_s=0.0)
    parser = ResponseParser(response)
    is_complete = False
    for number, piece in enumerate(pieces):
        assert not is_complete
        is_complete = parser.feed(piece, float(number))
    return response, is_complete


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_events_do_not_depend_on_how_the_bytes_are_cut(chunk_sizes: list[int], piece_sizes: list[int]) -> None:
    data = HEAD + chunked(BODY, chunk_sizes)
    pieces, start, turn = [], 0, 0
    while start < len(data):
        size = piece_sizes[turn % len(piece_sizes)]
        pieces.append(data[start : start + size])
        start, turn = start + size, turn + 1
    response, is_complete = parsed(pieces)
    assert is_complete
    assert response.status == 200
    assert [event for _, event in response.events] == [*(json.dumps(event).encode() for event in EVENTS), b"[DONE]"]
    assert read_answer(response, Expected(3, 5)).text == " 世界👋\n\n"


def test_every_event_has_the_time_of_its_last_byte() -> None:
    body = b"data: 1\n\ndata: 2\n\n"
    response, _ = parsed([HEAD, chunked(body, [4])[:12], chunked(body, [4])[12:]])
    assert [event for _, event in response.events] == [b"1", b"2"]
    assert [time_s for time_s, _ in response.events] == [2.0, 2.0]


def test_a_body_of_known_length_is_kept_whole() -> None:
    response, is_complete = parsed([b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nab", b"cd"])
    assert (is_complete, response.status, response.body) == (True, 503, b"abcd")
    assert parsed([b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n"])[1]


@pytest.mark.parametrize(
    "data", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", HEAD + b"zz\r\n", HEAD + b"-5\r\n", HEAD + b"\r\n"]
)
def test_what_is_no_response_is_an_error(data: bytes) -> None:
    with pytest.raises(ResponseError):
        parsed([data])


def test_a_response_without_a_length_ends_with_the_connection() -> None:
    response = Response(0.0)
    parser = ResponseParser(response)
    assert not parser.feed(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\nda", 1.0)
    assert not parser.feed(b"ta: 2\n\n", 2.0)
    assert parser.end(3.0)
    assert (response.events, response.ended_s) == ([(1.0, b"1"), (2.0, b"2")], 3.0)
    cut_off = ResponseParser(Response(0.0))
    assert not cut_off.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhal", 1.0)
    assert not cut_off.end(2.0)


def test_events_of_other_servers_are_understood() -> None:
    body = b"event: x\r\ndata: 1\r\n\r\ndata:2\r\n\r\n: comment\r\n\r\ndata: a\ndata: b\n\nid: 7\n\ndata: [DONE]\n\n"
    response, _ = parsed([HEAD, chunked(body, [7])])
    assert [data for _, data in response.events] == [b"1", b"2", b"a\nb", b"[DONE]"]
    assert event_data(b": only a comment") is None
    assert event_data(b"data:") == b""


def answered(events: list[object], ending: bytes = b"data: [DONE]\n\n", expected: Expected = EXPECTED) -> Answer:
    response, is_complete = parsed([HEAD, chunked(stream_of(events) + ending, [50])])
    assert is_complete
    return read_answer(response, expected)


def test_a_good_answer_has_times_and_tokens() -> None:
    answer = answered(list(EVENTS))
    assert answer.failure == ""
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (5, 3, 4)
    assert (answer.first_s, answer.total_s, list(answer.gaps_s)) == (1.0, 1.0, [0.0])


@pytest.mark.parametrize(
    ("events", "ending", "failure"),
    [
        (EVENTS, b"", "does not end with"),
        ([], b"", "does not end with"),
        (EVENTS[:3] + EVENTS[4:], b"data: [DONE]\n\n", "finish_reason is None"),
        (EVENTS[:4], b"data: [DONE]\n\n", "completion_tokens is None, not 3"),
        ([{"error": {"message": "gone"}}], b"data: [DONE]\n\n", "error event: gone"),
        ([{"no": "choices"}], b"data: [DONE]\n\n", "not understood: KeyError"),
    ],
)
def test_every_fault_of_an_answer_is_named(events: list[object], ending: bytes, failure: str) -> None:
    assert failure in answered(list(events), ending=ending).failure


@pytest.mark.parametrize(
    ("finish", "num_tokens", "failure"),
    [("stop", 3, ""), ("length", 9, ""), ("stop", 0, ""), ("stop", 10, "completion_tokens is 10, at most 9"),
     ("error", 3, "finish_reason is 'error', neither"), ("stop", None, "completion_tokens is None")],
)  # fmt: skip
def test_an_answer_that_may_stop_has_at_most_the_tokens_wanted(
    finish: str, num_tokens: int | None, failure: str
) -> None:
    events: list[object] = [
        {"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": finish}]},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": num_tokens}},
    ]
    answer = answered(events, expected=Expected(9, 5, may_stop=True))
    assert answer.failure.startswith(failure)
    assert bool(answer.failure) == bool(failure)
    assert answer.text == ("" if failure else "hm")


def test_a_refusal_is_named_with_its_message() -> None:
    body = b'{"error": {"message": "the queue is full"}}'
    response, _ = parsed([b"HTTP/1.1 503 X\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)])
    assert read_answer(response, Expected(3)).failure == "status 503: the queue is full"


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
LAST = WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: Close\r\n\r\n")
REQUEST = b'{"q": 1}'


async def asked(scripts: list[list[bytes]], num_requests: int) -> tuple[list[bytes | str], list[int]]:
    """Asks a server one thing after another over one `Connection`.

    The server gives each connection that it takes the answers of one script, the last of them before it has closed the
    connection; an empty answer is none. Returns bodies or errors, and how many requests each connection brought.
    """
    served: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(served)
        served.append(0)
        for answer in scripts[number]:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"POST /x HTTP/1.1\r\n")
            assert await reader.readexactly(len(REQUEST)) == REQUEST
            served[number] += 1
            writer.write(answer)
        writer.close()
        await writer.wait_closed()

    results: list[bytes | str] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connection = await Connection.open(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for _ in range(num_requests):
            try:
                results.append((await connection.request("POST", "/x", {"q": 1})).body)
            except ResponseError as error:
                results.append(str(error))
        connection.close()
        with pytest.raises(ResponseError, match="the connection is closed"):
            await connection.request("POST", "/x", {"q": 1})
    return results, served


CLOSED = "the connection broke: closed by the server"


@pytest.mark.parametrize(
    ("scripts", "results", "served"),
    [
        ([[WHOLE, WHOLE]], [b"{}", b"{}"], [2]),
        ([[WHOLE], [WHOLE]], [b"{}", b"{}"], [1, 1]),  # closed behind an answer
        ([[WHOLE, b""], [WHOLE]], [b"{}", b"{}"], [2, 1]),  # closed instead of an answer: sent once more
        ([[WHOLE, b""], [b""], [WHOLE]], [b"{}", CLOSED, b"{}"], [2, 1, 1]),  # once, never twice
        ([[b""], [WHOLE]], [CLOSED, b"{}"], [1, 1]),  # a new connection is believed
        ([[WHOLE, WHOLE[:1]], [WHOLE]], [b"{}", CLOSED, b"{}"], [2, 1]),  # a byte came
        ([[WHOLE, WHOLE[:-1]], [WHOLE]], [b"{}", CLOSED, b"{}"], [2, 1]),
        ([[LAST, WHOLE], [WHOLE]], [b"{}", b"{}"], [1, 1]),  # nothing is sent where the server said that it closes
        ([[b"FTP\r\n\r\n", WHOLE], [WHOLE]], ["no HTTP response: 'FTP'", b"{}"], [1, 1]),
    ],
)
def test_what_the_server_closed_is_asked_once_more(
    scripts: list[list[bytes]], results: list[bytes | str], served: list[int]
) -> None:
    assert asyncio.run(asyncio.wait_for(asked(scripts, len(results)), 20)) == (results, served)


def test_a_request_that_was_given_up_leaves_nothing_to_the_next_and_is_not_sent_again() -> None:
    async def main() -> None:
        requests: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        ended = asyncio.Semaphore(0)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                while await reader.read(1):
                    await reader.readuntil(REQUEST)
                    requests.put_nowait(writer)
            ended.release()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            connection = await Connection.open(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

            async def begin() -> tuple[asyncio.Task[Response], asyncio.StreamWriter]:
                return asyncio.create_task(connection.request("POST", "/x", {"q": 1})), await requests.get()

            first, writer = await begin()
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            writer.write(WHOLE.replace(b"{}", b"1\n"))
            await ended.acquire()
            second, writer = await begin()
            writer.write(WHOLE.replace(b"{}", b"2\n"))
            assert (await second).body == b"2\n"
            third, _ = await begin()
            connection.close()
            with pytest.raises(ResponseError, match="the connection broke"):
                await third
            await ended.acquire()
            assert requests.empty()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_only_http_urls_are_spoken() -> None:
    with pytest.raises(CommandError, match="not a http"):
        asyncio.run(Connection.open("ftp://127.0.0.1:1"))
