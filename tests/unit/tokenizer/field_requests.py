"""Requests for the tests of fields: what goes in over HTTP, and what the scheduler is asked for."""

from __future__ import annotations

from services.wire.requests import Submit
from tests.unit.tokenizer.backend_peers import Server
from tests.unit.tokenizer.http_client import Json, Response, request
from tests.unit.tokenizer.scripts import OK

NUM = "1, 2, 3, 4,"
CHAT: Json = {"messages": [{"role": "user", "content": "Hi"}]}


def complete(server: Server, body: Json) -> Response:
    server.backend.script = OK
    return request(server.port, "POST", "/v1/completions", {"prompt": NUM, **body})


def chat(server: Server, body: Json) -> Response:
    server.backend.script = OK
    return request(server.port, "POST", "/v1/chat/completions", {**CHAT, **body})


def submits_of(server: Server, body: Json, path: str = "/v1/completions") -> list[Submit]:
    """What a good request asks the scheduler for."""
    server.backend.script = OK
    server.backend.forget()
    response = request(server.port, "POST", path, body)
    assert response.status == 200, response.body
    return server.backend.take_submits(len(response.json()["choices"]))


def assert_refused(response: Response, param: str | None, status: int = 400) -> None:
    assert response.status == status, response.body
    assert response.error["param"] == param
    if param is not None:
        assert param.split("[")[0].split(".")[0] in response.error["message"]
