"""Streams as they are on the wire, and the bodies that must say the same."""

from __future__ import annotations

import json

import pytest

from services.wire.answers import TextChunks
from services.wire.finish import Finish
from services.wire.requests import Submit
from tests.unit.tokenizer.backend_peers import Server, admitted_stream, chunk, join
from tests.unit.tokenizer.http_client import Connection, EventReader, Json, request, text_of
from tests.unit.tokenizer.scripts import answering

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: Json = {"messages": [{"role": "user", "content": "Hi"}]}
PIECES = [" 5", ", ", "6, ", "👋🌍", "你好", '"\n\\', "\u2028", "end"]


def stream(server: Server, path: str, body: Json) -> tuple[EventReader, list[Json]]:
    """All events of a stream that the backend's script feeds."""
    with Connection(server.port) as connection:
        connection.send("POST", path, {"prompt": "x", **CHAT, **body, "stream": True})
        reader = EventReader(connection)
        assert reader.status == 200
        return reader, reader.rest()


def test_sse_07_the_first_chunk_has_the_role_and_later_ones_do_not(server: Server) -> None:
    server.backend.script = answering(PIECES)
    _, events = stream(server, CHAT_PATH, {})
    first, *later = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({(event["id"], event["model"], event["created"], event["object"]) for event in events}) == 1
    assert first["object"] == "chat.completion.chunk"
    for event in later:
        delta = event["choices"][0]["delta"]
        assert "role" not in delta
        assert delta == {} or isinstance(delta["content"], str)


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_sse_08_and_10_the_finish_reason_comes_alone_and_last(server: Server, path: str) -> None:
    server.backend.script = answering(PIECES)
    _, events = stream(server, path, {"max_tokens": 8})
    *inner, last = [event["choices"][0] for event in events]
    assert all(choice["finish_reason"] is None for choice in inner)
    assert last["finish_reason"] == "length"
    assert (last["delta"] == {}) if path == CHAT_PATH else (last["text"] == "")
    assert text_of(events) == "".join(PIECES)


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_sse_11_no_usage_chunk_unless_asked_for(server: Server, path: str, options: Json | None) -> None:
    server.backend.script = answering(PIECES)
    _, events = stream(server, path, {"stream_options": options})
    assert all(event["choices"] and "usage" not in event for event in events)


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_sse_11_one_usage_chunk_without_choices_before_done(server: Server, path: str) -> None:
    server.backend.script = answering(PIECES, cached=3)
    _, events = stream(server, path, {"stream_options": {"include_usage": True}})
    *inner, last = events
    assert all(event["usage"] is None and event["choices"] for event in inner)
    assert last["choices"] == []
    prompt_tokens = 1 if path == TEXT_PATH else 21
    assert last["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(PIECES),
        "total_tokens": prompt_tokens + len(PIECES),
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_sse_12_done_is_last_and_once_in_every_kind_of_stream(server: Server) -> None:
    for number in range(50):
        finish = Finish.LENGTH if number % 4 < 2 else Finish.STOP_TOKEN
        server.backend.script = answering(["a", "b"][: 1 + number % 2], finish)
        body = {"n": 1 + number % 2, "stream_options": {"include_usage": bool(number % 3)}}
        reader, _ = stream(server, (CHAT_PATH, TEXT_PATH)[number % 2], body)
        assert reader.body.count(b"data: [DONE]\n\n") == 1


def test_sse_13_events_survive_any_cut_of_the_socket(server: Server) -> None:
    server.backend.script = answering(PIECES)
    texts = []
    for size in (1, 65536):
        with Connection(server.port) as connection:
            connection.send("POST", TEXT_PATH, {"prompt": "x", "stream": True})
            connection.read_head()
            while b"0\r\n\r\n" not in connection.pending:
                assert connection.fill(size)
            raw = connection.pending
        body = b""
        while raw:
            length, _, raw = raw.partition(b"\r\n")
            body, raw = body + raw[: int(length, 16)], raw[int(length, 16) + 2 :]
        events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n")[:-2]]
        assert all(len(event.decode().splitlines()) == 1 for event in events)
        texts.append("".join(json.loads(event)["choices"][0]["text"] for event in events))
    assert texts == ["".join(PIECES)] * 2


def test_sse_13_the_events_of_a_batch_are_one_piece_each_stream(server: Server) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": "x", "stream": True, "n": 2})
        first, second = server.backend.take_submits(2)
        server.backend.admit(first, second)
        reader = EventReader(connection)
        server.backend.send_text(join([chunk(first, 0, [1], 0, "a"), chunk(second, 0, [1], 0, "b")]))
        assert [reader.next_json()["choices"][0]["text"] for _ in range(2)] == ["a", "b"]
        assert len(reader.pieces) == 1
        ends = [chunk(submit, 1, [2], 1, "z", Finish.LENGTH) for submit in (first, second)]
        server.backend.send_text(join(ends))
        events = reader.rest()
        assert len(reader.pieces) == 2
        assert (text_of(events, 0), text_of(events, 1)) == ("z", "z")


def test_sse_14_headers_tell_proxies_not_to_buffer(server: Server) -> None:
    server.backend.script = answering(PIECES)
    reader, _ = stream(server, CHAT_PATH, {})
    assert reader.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reader.headers["cache-control"] == "no-cache"
    assert reader.headers["x-accel-buffering"] == "no"
    assert reader.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in reader.headers
    assert reader.headers["server"] == "tokenway"


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize(
    ("finish", "reason"), [(Finish.LENGTH, "length"), (Finish.STOP_TOKEN, "stop"), (Finish.STOP_STRING, "stop")]
)
def test_sse_18_and_met_06_body_and_stream_say_the_same(server: Server, path: str, finish: Finish, reason: str) -> None:
    server.backend.script = answering(PIECES, finish, cached=1)
    whole = request(server.port, "POST", path, {"prompt": "x", **CHAT}).json()
    _, events = stream(server, path, {"stream_options": {"include_usage": True}})
    choice = whole["choices"][0]
    text = choice["message"]["content"] if path == CHAT_PATH else choice["text"]
    assert text == text_of(events) == "".join(PIECES)
    assert choice["finish_reason"] == events[-2]["choices"][0]["finish_reason"] == reason
    assert whole["usage"] == events[-1]["usage"]
    assert whole["usage"]["completion_tokens"] == len(PIECES)


@pytest.mark.parametrize("is_stream", [False, True])
def test_met_01_a_prompt_counts_once_for_all_its_choices(server: Server, is_stream: bool) -> None:
    server.backend.script = answering(list("abcdefgh"), cached=10)
    body: Json = {"prompt": "1, 2, 3, 4,", "n": 3, "max_tokens": 8, "ignore_eos": True}
    if is_stream:
        _, events = stream(server, TEXT_PATH, {**body, "stream_options": {"include_usage": True}})
        usage = events[-1]["usage"]
        assert [text_of(events, index) for index in range(3)] == ["abcdefgh"] * 3
    else:
        whole = request(server.port, "POST", TEXT_PATH, body).json()
        usage = whole["usage"]
        assert [choice["text"] for choice in whole["choices"]] == ["abcdefgh"] * 3
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (11, 24, 35)


def test_met_03_prompt_tokens_do_not_shrink_on_a_hit(server: Server) -> None:
    for cached in (0, 10):
        server.backend.script = answering(["a"], cached=cached)
        usage = request(server.port, "POST", TEXT_PATH, {"prompt": "1, 2, 3, 4,"}).json()["usage"]
        assert usage["prompt_tokens"] == 11
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_tok_05_several_prompts_answer_in_order_and_count_together(server: Server) -> None:
    def script(submit: Submit) -> list[TextChunks]:
        text = bytes(submit.prompt_token_ids[::4]).decode()
        return [chunk(submit, 0, [1], 0, f"{text}{submit.sampling.choice}", Finish.LENGTH, cached=1)]

    server.backend.script = script
    body: Json = {"prompt": ["ab", "c"], "n": 2}
    whole = request(server.port, "POST", TEXT_PATH, body).json()
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "ab0"),
        (1, "ab1"),
        (2, "c0"),
        (3, "c1"),
    ]
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    _, events = stream(server, TEXT_PATH, body)
    assert [text_of(events, index) for index in range(4)] == ["ab0", "ab1", "c0", "c1"]


def test_echo_opens_each_answer_of_a_stream(server: Server) -> None:
    server.backend.script = answering(["a", "b"])
    _, events = stream(server, TEXT_PATH, {"prompt": "été", "echo": True, "n": 2})
    assert [text_of(events, index) for index in range(2)] == ["étéab"] * 2


def test_withheld_text_makes_no_empty_chunks(server: Server) -> None:
    with Connection(server.port) as connection:
        submit, reader = admitted_stream(server.backend, connection, TEXT_PATH, {"prompt": "x", "stream": True})
        server.backend.send_text(
            chunk(submit, 0, [1], 0, ""),
            chunk(submit, 1, [2], 0, "👋"),
            chunk(submit, 2, [3, 4], 4, ""),
            chunk(submit, 4, [], 4, "tail", Finish.LENGTH),
        )
        texts = [event["choices"][0]["text"] for event in reader.rest()]
        assert texts == ["👋", "tail", ""]


def test_chunks_that_overtake_the_admission_are_kept_and_the_status_line_waits(server: Server) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": "x", "stream": True})
        (submit,) = server.backend.take_submits()
        server.backend.send_text(chunk(submit, 0, [1], 0, "early"))
        assert request(server.port, "GET", "/live").status == 200
        assert not connection.pending
        server.backend.admit(submit)
        reader = EventReader(connection)
        assert reader.next_json()["choices"][0]["text"] == "early"
        server.backend.send_text(chunk(submit, 1, [2], 5, "", Finish.STOP_TOKEN))
        assert reader.rest()[-1]["choices"][0]["finish_reason"] == "stop"


def test_repeated_old_and_foreign_chunks_leave_the_text_alone_and_a_gap_is_asked_for(server: Server) -> None:
    backend = server.backend
    with Connection(server.port) as connection:
        submit, reader = admitted_stream(backend, connection, TEXT_PATH, {"prompt": "x", "stream": True})
        first = chunk(submit, 0, [1], 0, "é")
        backend.send_text(first, first, chunk(submit, 1, [9], 2, "other attempt", attempt=1))
        backend.send_text(chunk(submit, 2, [3], 3, "c"))
        backend.wait_for_resend(submit, 0)
        backend.send_text(chunk(submit, 0, [1, 2, 3], 0, "ébc"), chunk(submit, 2, [3], 3, "c"))
        backend.send_text(chunk(submit, 3, [4], 4, "d", Finish.LENGTH))
        backend.send_text(chunk(submit, 4, [5], 5, "after the end"))
        assert text_of(reader.rest()) == "ébcd"
    backend.wait_for_acknowledgement(submit, 4)


def test_what_a_stream_got_is_acknowledged_while_it_runs(server: Server) -> None:
    backend = server.backend
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": "x", "stream": True})
        (submit,) = backend.take_submits()
        backend.admit(submit)
        backend.send_text(chunk(submit, 0, [1, 2], 0, "ab"))
        backend.wait_for_acknowledgement(submit, 2)
        backend.send_text(chunk(submit, 2, [3], 2, "c"))
        backend.wait_for_acknowledgement(submit, 3)


def test_http_1_0_gets_a_stream_that_ends_with_the_connection(server: Server) -> None:
    server.backend.script = answering(["a", "b"])
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    with Connection(server.port) as connection:
        head = f"POST {TEXT_PATH} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sock.sendall(head.encode() + body)
        _, headers = connection.read_head()
        assert "transfer-encoding" not in headers
        while connection.fill():
            pass
        assert connection.pending.startswith(b"data: {")
        assert connection.pending.endswith(b"}\n\ndata: [DONE]\n\n")


def test_a_connection_serves_stream_after_stream(server: Server) -> None:
    server.backend.script = answering(["a", "b"])
    with Connection(server.port) as connection:
        for _ in range(3):
            connection.send("POST", TEXT_PATH, {"prompt": "x", "stream": True})
            assert text_of(EventReader(connection).rest()) == "ab"
            connection.send("GET", "/live")
            assert connection.read_response().status == 200


def test_sch_21_callers_ids_are_never_ours(server: Server) -> None:
    def script(submit: Submit) -> list[TextChunks]:
        return [chunk(submit, 0, [1], 0, bytes(submit.prompt_token_ids[::4]).decode(), Finish.LENGTH)]

    server.backend.script = script
    with Connection(server.port) as first, Connection(server.port) as second:
        for connection, prompt in ((first, "one"), (second, "two")):
            body = {"prompt": prompt, "request_id": "same", "rid": "same"}
            connection.send("POST", TEXT_PATH, body, X_Request_Id="same")
        answers = [connection.read_response() for connection in (first, second)]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["one", "two"]
    assert answers[0].json()["id"] != answers[1].json()["id"]
    assert answers[0].headers["x-request-id"] == answers[0].json()["id"]
