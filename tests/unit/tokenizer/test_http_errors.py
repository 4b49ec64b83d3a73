"""Every failure in OpenAI's form: before the first byte a status, after it one event, [DONE] and the end."""

from __future__ import annotations

import json

import openai
import pytest

from services.wire.finish import Finish
from services.wire.members import Role, State
from services.wire.requests import Submit
from tests.sockets import wait_until
from tests.unit.tokenizer.backend_peers import Server, admitted_stream, chunk, join
from tests.unit.tokenizer.http_client import Connection, EventReader, Json, metric, request, text_of
from tests.unit.tokenizer.scripts import OK, answering

TEXT_PATH = "/v1/completions"
BODY: Json = {"prompt": "x"}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/completion", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("POST", "//v1/completions", 404, "not_found"),
        ("GET", "/%00%0d%0a", 404, "not_found"),
        ("GET", "/%6cive", 404, "not_found"),
        ("GET", "/v1%2fmodels", 404, "not_found"),
        ("GET", "/live/../live", 404, "not_found"),
        ("CONNECT", "example.com:443", 404, "not_found"),
        ("OPTIONS", "*", 404, "not_found"),
        ("GET", "/server_info", 404, "not_found"),
        ("POST", "/flush_cache", 404, "not_found"),
        ("GET", TEXT_PATH, 405, "method_not_allowed"),
        ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/small", 405, "method_not_allowed"),
        ("POST", "/live", 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/..%2f..%2fetc", 404, "model_not_found"),
    ],
)
def test_api_05_unknown_routes_and_methods_have_the_error_body(
    server: Server, method: str, path: str, status: int, code: str
) -> None:
    response = request(server.port, method, path)
    assert response.status == status
    assert response.error["code"] == code
    assert response.error["type"] == "invalid_request_error"
    if code == "not_found":
        assert response.error["message"] == f"there is no {path} here"
    if status == 405:
        assert response.headers["allow"] in ("POST", "GET, HEAD")


def test_api_05_the_official_client_raises_its_own_errors(server: Server) -> None:
    with openai.OpenAI(api_key="x", base_url=f"http://127.0.0.1:{server.port}/v1", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="max_tokens") as bad:
            client.completions.create(model="small", prompt="x", max_tokens=0)
        assert bad.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError, match="other"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.NotFoundError):
            client.moderations.create(input="x")
        server.backend.tell_load(num_waiting=64)
        wait_until(lambda: request(server.port, "POST", TEXT_PATH, b"{").status == 503)
        with pytest.raises(openai.InternalServerError, match="waiting") as full:
            client.chat.completions.create(model="small", messages=[{"role": "user", "content": "x"}], stream=True)
        assert full.value.status_code == 503


def test_the_official_client_streams_and_completes(server: Server) -> None:
    server.backend.script = answering(["Hel", "lo ", "👋"], Finish.STOP_TOKEN, cached=5)
    with openai.OpenAI(api_key="x", base_url=f"http://127.0.0.1:{server.port}/v1", max_retries=0) as client:
        with client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        ) as chunks:
            received = list(chunks)
        assert "".join(part.choices[0].delta.content or "" for part in received[:-1]) == "Hello 👋"
        assert received[-2].choices[0].finish_reason == "stop"
        usage = received[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (3, 5)
        whole = client.completions.create(model="small", prompt="x", n=2)
        assert [choice.text for choice in whole.choices] == ["Hello 👋"] * 2
        assert [model.id for model in client.models.list()] == ["small"]
        assert client.models.retrieve("small").id == "small"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "retry", "header"),
    [
        (400, "context_length_exceeded", 0, None),
        (503, "queue_full", 7, "7"),
        (503, "draining", 0, "1"),
        (429, "x", 3, "3"),
    ],
)
def test_sse_06_a_refusal_is_a_status_also_for_streams(
    server: Server, is_stream: bool, status: int, code: str, retry: int, header: str | None
) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, {**BODY, "stream": is_stream})
        (submit,) = server.backend.take_submits()
        server.backend.refuse(submit, status, code, "the reason", "prompt" if status == 400 else "", retry)
        response = connection.read_response()
        assert (response.status, response.error["code"], response.error["message"]) == (status, code, "the reason")
        assert response.error["param"] == ("prompt" if status == 400 else None)
        assert response.headers.get("retry-after") == header
        connection.send("GET", "/live")
        assert connection.read_response().status == 200
    assert server.backend.num_aborted(submit) == 0


def test_sse_06_a_chat_blames_its_messages_and_a_refused_sibling_ends_all(server: Server) -> None:
    with Connection(server.port) as connection:
        body = {"messages": [{"role": "user", "content": "x"}], "n": 3, "stream": True}
        connection.send("POST", "/v1/chat/completions", body)
        submits = server.backend.take_submits(3)
        server.backend.admit(submits[0])
        server.backend.refuse(submits[1], 400, "context_length_exceeded", "too long", "prompt")
        response = connection.read_response()
        assert (response.status, response.error["param"]) == (400, "messages")
    server.backend.wait_for_abort(submits[0])
    server.backend.wait_for_abort(submits[2])
    assert server.backend.num_aborted(submits[1]) == 0


@pytest.mark.parametrize(
    "body", [{"prompt": [81] * 9000}, {"prompt": "x", "temperature": -1}, {"prompt": "x", "response_format": "x"}]
)
def test_sse_06_what_is_known_before_the_first_token_is_a_status(server: Server, body: Json) -> None:
    response = request(server.port, "POST", TEXT_PATH, {**body, "stream": True})
    assert response.status == 400
    assert response.error["message"]


def test_sse_06_a_full_queue_refuses_before_the_body_is_read(server: Server) -> None:
    server.backend.tell_load(num_waiting=64, retry_after_s=9)
    wait_until(lambda: request(server.port, "POST", TEXT_PATH, b"{").status == 503)
    response = request(server.port, "POST", TEXT_PATH, {**BODY, "stream": True})
    assert (response.status, response.error["code"], response.headers["retry-after"]) == (503, "queue_full", "9")
    assert not server.backend.arrived(Submit)
    server.backend.tell_load(num_waiting=0, max_waiting=0)
    server.backend.script = OK
    wait_until(lambda: request(server.port, "POST", TEXT_PATH, BODY).status == 200)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT_PATH, {"prompt": ["a", "b"], "n": 2}, "prompt"),
        (TEXT_PATH, {"prompt": "a", "n": 4, "stream": True}, "n"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 4}, "n"),
        ("/v1/embeddings", {"input": ["a"] * 4}, "input"),
        ("/v1/score", {"prompt": [1], "continuations": [[2]] * 4}, "continuations"),
        ("/generate", {"text": ["a"] * 4}, "text"),
        ("/generate", {"text": "a", "sampling_params": {"n": 4}}, "sampling_params.n"),
    ],
)
def test_more_answers_than_can_ever_run_and_wait_at_once_are_no_503(
    server: Server, path: str, body: Json, param: str
) -> None:
    server.backend.tell_load(max_open=3, max_waiting=2, max_total_tokens=4000)
    server.backend.wait_for_load(server.port, 4000)
    response = request(server.port, "POST", path, body)
    assert (response.status, response.error["code"], response.error["param"]) == (400, "invalid_value", param)
    assert "at most 3" in response.error["message"]
    assert not server.backend.arrived(Submit)
    server.backend.tell_load(max_open=4, max_waiting=64)
    server.backend.script = OK
    if path == TEXT_PATH:
        wait_until(lambda: request(server.port, "POST", path, body).status == 200)


@pytest.mark.parametrize(("state", "code"), [(State.STARTING, "starting"), (State.DRAINING, "draining")])
def test_a_group_that_starts_or_drains_answers_503(server: Server, state: State, code: str) -> None:
    server.backend.tell_load(state=state)
    wait_until(lambda: request(server.port, "POST", TEXT_PATH, b"{").status == 503)
    response = request(server.port, "POST", TEXT_PATH, BODY)
    assert (response.status, response.error["code"], response.headers["retry-after"]) == (
        503,
        code,
        "2" if code == "draining" else "1",
    )


@pytest.mark.parametrize("role", [Role.GPU_WORKER, Role.DETOKENIZER])
def test_prc_01_losing_a_role_ends_every_request_and_refuses_new_ones(server: Server, role: Role) -> None:
    backend = server.backend
    with Connection(server.port) as streaming, Connection(server.port) as waiting:
        streaming.send("POST", TEXT_PATH, {**BODY, "stream": True})
        (streamed,) = backend.take_submits()
        backend.admit(streamed)
        reader = EventReader(streaming)
        backend.send_text(chunk(streamed, 0, [1], 0, "a"))
        assert reader.next_json()["choices"][0]["text"] == "a"
        waiting.send("POST", TEXT_PATH, BODY)
        (whole,) = backend.take_submits()
        backend.tell_roles(*({Role.SCHEDULER, Role.GPU_WORKER, Role.DETOKENIZER} - {role}))
        response = waiting.read_response()
        assert (response.status, response.error["code"]) == (503, "backend_lost")
        assert reader.rest()[0]["error"]["code"] == "backend_lost"
        assert streaming.is_closed()
    for submit in (streamed, whole):
        backend.wait_for_abort(submit)
    assert request(server.port, "POST", TEXT_PATH, BODY).error["code"] == "starting"
    assert request(server.port, "GET", "/health").json()["roles"][str(role)] == "none in the group"


@pytest.mark.parametrize(
    ("finish", "status", "code"),
    [
        (Finish.NUMERICAL_ERROR, 500, "numerical_error"),
        (Finish.INTERNAL_ERROR, 500, "internal_error"),
        (Finish.GRAMMAR_TOO_LARGE, 400, "invalid_grammar"),
        (Finish.TIMEOUT, 504, "timeout"),
        (Finish.BACKEND_LOST, 503, "backend_lost"),
        (Finish.ABORTED, 503, "aborted"),
    ],
)
def test_sse_05_an_error_after_the_first_byte_is_one_event_and_the_end(
    server: Server, finish: Finish, status: int, code: str
) -> None:
    backend = server.backend
    with Connection(server.port) as failing, Connection(server.port) as other, Connection(server.port) as whole:
        submits = []
        for connection, body in ((failing, {**BODY, "stream": True}), (other, {**BODY, "stream": True}), (whole, BODY)):
            connection.send("POST", TEXT_PATH, body)
            submits += backend.take_submits()
        backend.admit(*submits)
        readers = [EventReader(failing), EventReader(other)]
        backend.send_text(join(chunk(submit, 0, [1], 0, "so far") for submit in submits))
        ends = [chunk(submit, 1, [], 6, "", finish) for submit in (submits[0], submits[2])]
        backend.send_text(join(ends))
        events = readers[0].rest()
        assert text_of(events[:1]) == "so far"
        assert events[1]["error"]["code"] == code
        assert len(events) == 2
        assert failing.is_closed()
        response = whole.read_response()
        assert (response.status, response.error["code"]) == (status, code)
        backend.send_text(chunk(submits[1], 1, [2], 6, "!", Finish.LENGTH))
        assert text_of(readers[1].rest()) == "so far!"


def test_sse_05_a_lost_detokenizer_is_told_by_the_scheduler_whatever_the_cursor(server: Server) -> None:
    backend = server.backend
    with Connection(server.port) as connection:
        submit, reader = admitted_stream(backend, connection, TEXT_PATH, {**BODY, "stream": True})
        backend.send_text(chunk(submit, 0, [1], 0, "a"))
        assert reader.next_json()["choices"][0]["text"] == "a"
        backend.send(chunk(submit, 40, [], 0, "", Finish.BACKEND_LOST))
        assert reader.rest()[0]["error"]["code"] == "backend_lost"


def test_errors_tell_no_internals_and_the_log_knows_the_id(server: Server) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, BODY)
        (submit,) = server.backend.take_submits()
        server.backend.admit(submit)
        server.backend.send_text(chunk(submit, 0, [], 0, "", Finish.INTERNAL_ERROR))
        error = connection.read_response().error
    assert error["type"] == "server_error"
    error_id = error["message"].rsplit(" ", 1)[1]
    assert error["message"] == f"internal error, id {error_id}"
    assert submit.request_id.hex() in server.wait_for_line(error_id)


def test_prc_05_a_chunk_that_contradicts_the_journal_fails_its_request_alone(server: Server) -> None:
    backend = server.backend
    with Connection(server.port) as failing, Connection(server.port) as other:
        for connection in (failing, other):
            connection.send("POST", TEXT_PATH, {**BODY, "stream": True})
        submits = backend.take_submits(2)
        backend.admit(*submits)
        readers = [EventReader(connection) for connection in (failing, other)]
        backend.send_text(join(chunk(submit, 0, [1, 2], 0, "ab") for submit in submits))
        backend.send_text(chunk(submits[0], 0, [1], 0, "a", Finish.LENGTH))
        backend.send_text(chunk(submits[1], 2, [3], 2, "c", Finish.LENGTH))
        endings = sorted("error" if "error" in reader.rest()[-1] else "good" for reader in readers)
        assert endings == ["error", "good"]
    assert server.wait_for_line("below its cursor")
    server.lines.clear()  # the trace was wanted


def test_garbage_and_messages_of_the_wrong_kind_or_sender_are_dropped_and_counted(server: Server) -> None:
    backend = server.backend
    with Connection(server.port) as connection:
        submit, reader = admitted_stream(backend, connection, TEXT_PATH, {**BODY, "stream": True})
        before = dropped(server)
        for frame in (b"", b"\xc1", b"\x93\x01\x02", b"\x91\xcd\xff\xff", b"{}", b"\xdd" + b"\xff" * 4):
            backend.send_raw(frame)
        forged = chunk(submit, 0, [1], 0, "forged", Finish.LENGTH)
        for name in (b"gpu_worker/w/0000000000000001", b"nobody", b"tokenizer/x/0000000000000002"):
            backend.send_as(name, forged)
        backend.send(submit)
        backend.send_text(chunk(submit, 0, [1], 0, "true", Finish.LENGTH))
        assert text_of(reader.rest()) == "true"
        wait_until(lambda: dropped(server) >= before + 12 + 3 + 1)


def dropped(server: Server) -> float:
    return metric(server.port, "tokenway:tokenizer_refused_messages_total")


def test_head_requests_have_a_head_and_no_body(server: Server) -> None:
    with Connection(server.port) as connection:
        connection.send("HEAD", "/live")
        status, headers = connection.read_head()
        assert (status, headers["content-length"]) == (200, str(len(json.dumps({"status": "ok"}).replace(" ", ""))))
        connection.send("GET", "/live")
        assert connection.read_response().json() == {"status": "ok"}
