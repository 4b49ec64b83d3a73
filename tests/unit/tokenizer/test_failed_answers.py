"""What a failed request for answers has beside its body: the id that the log knows, and whether to send it again."""

from __future__ import annotations

import re
from collections.abc import Callable

import openai
import pytest

from services.tokenizer.api_error import ApiError, Code, finish_error, refusal_error
from services.tokenizer.routes import ROUTES
from services.wire.finish import Finish
from services.wire.requests import Refused, Submit
from tests.sockets import wait_until
from tests.unit.tokenizer.backend_peers import Server, chunk
from tests.unit.tokenizer.http_client import Connection, Json, Response, request
from tests.unit.tokenizer.scripts import answering

MESSAGES: Json = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, tuple[str, Json]] = {
    "/v1/chat/completions": ("chatcmpl-", MESSAGES),
    "/v1/completions": ("cmpl-", {"prompt": "x"}),
    "/v1/responses": ("resp_", {"input": "x"}),
    "/v1/messages": ("msg_", {**MESSAGES, "model": "small", "max_tokens": 5}),
    "/generate": ("gen-", {"text": "x"}),
    "/v1/embeddings": ("embd-", {"input": "x"}),
    "/v1/score": ("score-", {"prompt": "x", "continuations": ["y"]}),
}
WOULD_REPEAT = {Finish.ABORTED, Finish.TIMEOUT, Finish.NUMERICAL_ERROR, Finish.INTERNAL_ERROR}
BAD_ENDS = [*WOULD_REPEAT, Finish.BACKEND_LOST]


def assert_has_id(response: Response, path: str) -> str:
    """Its id in the form of the route; the hexadecimal digits."""
    kind, _ = BODIES[path]
    name = response.headers["x-request-id"]
    match = re.fullmatch(f"{kind}([0-9a-f]{{32}})", name)
    assert match, name
    assert response.headers.get("request-id") == (name if kind == "msg_" else None)
    return match[1]


def test_every_route_that_asks_for_answers_is_tried_here() -> None:
    assert {path: kind for path, (kind, _) in BODIES.items()} == {
        path: str(route.answers) for path, route in ROUTES.items() if route.answers is not None
    }


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("finish", BAD_ENDS)
def test_an_answer_that_ends_badly_has_its_id_and_says_whether_to_retry(
    server: Server, path: str, finish: Finish
) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", path, BODIES[path][1])
        (submit,) = server.backend.take_submits()
        server.backend.admit(submit)
        server.backend.send_text(chunk(submit, 0, [], 0, "", finish))
        response = connection.read_response()
    assert response.status >= 500
    assert assert_has_id(response, path) == submit.request_id.hex()
    repeats = finish in WOULD_REPEAT
    assert response.headers.get("x-should-retry") == ("false" if repeats else None)
    assert ("retry-after" in response.headers) == (not repeats)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{", {}),
        (b"{}", {"Content_Type": "text/plain"}),
        (b'{"model": "other"}', {}),
        (b"{}", {"Expect": "a miracle"}),
    ],
)
def test_a_refused_request_has_an_id_that_the_log_knows(
    server: Server, path: str, body: bytes, headers: dict[str, str]
) -> None:
    response = request(server.port, "POST", path, body, **headers)
    assert 400 <= response.status < 500
    assert_has_id(response, path)
    assert not server.backend.arrived(Submit)


def test_the_log_calls_a_refused_request_as_its_client_does(start_server: Callable[..., Server]) -> None:
    server = start_server("--log-requests")
    response = request(server.port, "POST", "/v1/completions", b"[]")
    digits = assert_has_id(response, "/v1/completions")
    assert "request ended" in server.wait_for_line(digits)


def test_a_refusal_by_load_or_by_the_scheduler_has_an_id(server: Server) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", "/v1/completions", {"prompt": "x"})
        (submit,) = server.backend.take_submits()
        server.backend.refuse(submit, 503, "queue_full", "the reason", "", 7)
        response = connection.read_response()
    assert assert_has_id(response, "/v1/completions") == submit.request_id.hex()
    assert "x-should-retry" not in response.headers
    server.backend.tell_load(num_waiting=64, retry_after_s=9)
    wait_until(lambda: request(server.port, "POST", "/v1/completions", b"{").status == 503)
    refused = request(server.port, "POST", "/v1/completions", {"prompt": "x"})
    assert_has_id(refused, "/v1/completions")
    assert (refused.headers["retry-after"], refused.headers.get("x-should-retry")) == ("9", None)


def test_what_asks_for_no_answers_has_no_id(server: Server) -> None:
    for path in ("/nope", "/v1/models/other", "/tokenize"):
        assert "x-request-id" not in request(server.port, "POST", path, b"{").headers


@pytest.mark.parametrize(
    ("finish", "num_requests"), [(Finish.TIMEOUT, 1), (Finish.ABORTED, 1), (Finish.BACKEND_LOST, 3)]
)
def test_the_official_client_sends_again_what_may_come_out_otherwise(
    server: Server, finish: Finish, num_requests: int
) -> None:
    server.backend.script = answering(["x"], finish)
    with (
        openai.OpenAI(api_key="x", base_url=f"http://127.0.0.1:{server.port}/v1", max_retries=2) as client,
        pytest.raises(openai.InternalServerError) as failed,
    ):
        client.completions.create(model="small", prompt="x")
    assert failed.value.request_id is not None
    assert failed.value.request_id.startswith("cmpl-")
    assert len(server.backend.arrived(Submit)) == num_requests


def test_no_error_says_both_and_every_other_unavailability_says_when() -> None:
    errors = [error for finish in Finish if (error := finish_error(finish)) is not None]
    errors += [refusal_error(Refused(b"", 0, 503, code, "", "x", 3)) for code in Code]
    assert {error.code for error in errors if "x-should-retry" in error.headers()} == {
        Code.ABORTED, Code.TIMEOUT, Code.NUMERICAL_ERROR, Code.INTERNAL_ERROR,
    }  # fmt: skip
    for error in (error for error in errors if error.status >= 500):
        told = set(error.headers()) & {"x-should-retry", "Retry-After"}
        assert len(told) == 1, error.code
    assert not ApiError(400, "x", code=Code.INVALID_VALUE).headers()
