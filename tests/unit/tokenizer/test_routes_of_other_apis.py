"""/v1/responses and /v1/messages over HTTP: whole, streamed, refused and broken off, each in its API's own form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.wire.columns import unpack_int32
from services.wire.finish import Finish
from tests.unit.tokenizer.backend_peers import Server, chunk
from tests.unit.tokenizer.http_client import Connection, EventReader, Response, request
from tests.unit.tokenizer.scripts import answering

Json = dict[str, Any]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, Json] = {
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
}
BOTH = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])


def ask(server: Server, path: str, **body: object) -> Response:
    return request(server.port, "POST", path, {**BODIES[path], **body})


def named_events(reader: EventReader) -> list[Json]:
    """All events of a stream; the name of each is the type of its data."""
    found: list[Json] = []
    while event := reader.next():
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def stream(server: Server, path: str, **body: object) -> list[Json]:
    with Connection(server.port) as connection:
        connection.send("POST", path, {**BODIES[path], "stream": True, **body})
        reader = EventReader(connection)
        assert reader.headers["content-type"] == "text/event-stream; charset=utf-8"
        return named_events(reader)


def text_of(path: str, answer: Json) -> str:
    content = answer["output"][0]["content"] if path == RESPONSES else answer["content"]
    return "".join(part["text"] for part in content)


@BOTH
def test_an_answer_whole_and_streamed_is_the_same(server: Server, path: str) -> None:
    server.backend.script = answering(["你", "好\u2028", "👋"], Finish.STOP_TOKEN, cached=4)
    response = ask(server, path)
    assert response.status == 200
    answer = response.json()
    assert text_of(path, answer) == "你好\u2028👋"
    assert response.headers["x-request-id"] == answer["id"]
    events = stream(server, path)
    if path == RESPONSES:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        last = events[-1]["response"]
        changing = ("id", "created_at", "output")
        assert {k: v for k, v in last.items() if k not in changing} == {
            k: v for k, v in answer.items() if k not in changing
        }
        assert text_of(path, last) == text_of(path, answer)
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 4
    else:
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta["text"] for delta in deltas) == text_of(path, answer)
        assert events[-2]["usage"] == answer["usage"]
        assert answer["usage"]["cache_read_input_tokens"] == 4
        assert response.headers["request-id"] == answer["id"]


@BOTH
def test_no_stream_ends_with_done(server: Server, path: str) -> None:
    server.backend.script = answering(["x"])
    events = stream(server, path)
    assert events[-1]["type"] in ("response.incomplete", "message_stop")


@BOTH
def test_both_ask_what_a_chat_asks(server: Server, path: str) -> None:
    server.backend.script = answering(["x"])
    limit = {"max_output_tokens": 5} if path == RESPONSES else {"max_tokens": 5}
    ask(server, path, temperature=0.25, top_p=0.5, **limit)
    [submit] = server.backend.take_submits()
    server.backend.forget()
    chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.25, "top_p": 0.5, "max_tokens": 5}
    request(server.port, "POST", "/v1/chat/completions", chat)
    [expected] = server.backend.take_submits()
    assert unpack_int32(submit.prompt_token_ids) == unpack_int32(expected.prompt_token_ids)
    assert (submit.max_tokens, submit.stop_token_ids) == (expected.max_tokens, expected.stop_token_ids)
    assert (submit.sampling.temperature, submit.sampling.top_p) == (0.25, 0.5)


@BOTH
def test_sse_05_an_error_after_the_first_byte_is_an_event(server: Server, path: str) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", path, {**BODIES[path], "stream": True})
        [submit] = server.backend.take_submits()
        server.backend.admit(submit)
        server.backend.send_text(chunk(submit, 0, [1000], 0, "half"))
        reader = EventReader(connection)
        while "half" not in reader.next():
            pass
        server.backend.send_text(chunk(submit, 1, [], 4, "", Finish.BACKEND_LOST))
        last = named_events(reader)[-1]
        assert connection.is_closed()
    if path == RESPONSES:
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["message"].startswith("backend_lost: ")
    else:
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")


@BOTH
def test_sse_06_a_refusal_is_a_status(server: Server, path: str) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", path, {**BODIES[path], "stream": True})
        [submit] = server.backend.take_submits()
        server.backend.refuse(submit, 503, "queue_full", retry=3)
        response = connection.read_response()
    assert (response.status, response.headers["retry-after"]) == (503, "3")
    error = response.json()["error"]
    assert error["type"] == ("server_error" if path == RESPONSES else "overloaded_error")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", MESSAGES, {"messages": []}, 400, "invalid_request_error"),
        ("POST", MESSAGES, {**BODIES[MESSAGES], "model": "claude"}, 404, "not_found_error"),
        ("GET", MESSAGES, None, 405, "invalid_request_error"),
        ("POST", MESSAGES, b"{", 400, "invalid_request_error"),
        ("POST", MESSAGES + "/count_tokens", {}, 400, "invalid_request_error"),
    ],
)
def test_api_05_errors_of_messages_have_anthropics_form(
    server: Server, method: str, path: str, body: object, status: int, kind: str
) -> None:
    response = request(server.port, method, path, body)
    assert response.status == status
    whole = response.json()
    assert (whole["type"], whole["error"]["type"], set(whole["error"])) == ("error", kind, {"type", "message"})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSES, {"input": "x" * 9000}, "input"),
        (RESPONSES, {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        (
            RESPONSES,
            {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "text.format.schema",
        ),
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_errors_name_the_clients_field(server: Server, path: str, body: Json, param: str) -> None:
    response = request(server.port, "POST", path, body)
    assert response.status == 400
    assert response.error["param"] == param


@BOTH
def test_api_02_unknown_names_are_told(server: Server, path: str) -> None:
    server.backend.script = answering(["x"])
    assert ask(server, path, zipzap=1).headers["x-ignored-fields"] == "zipzap"


def test_api_02_unknown_names_of_a_count_are_told(server: Server) -> None:
    body = {"messages": BODIES[MESSAGES]["messages"], "zipzap": 1}
    response = request(server.port, "POST", MESSAGES + "/count_tokens", body)
    assert response.headers["x-ignored-fields"] == "zipzap"


@BOTH
def test_sse_01_a_client_that_leaves_ends_its_answer(server: Server, path: str) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", path, {**BODIES[path], "stream": True})
        [submit] = server.backend.take_submits()
        server.backend.admit(submit)
    server.backend.wait_for_abort(submit)
