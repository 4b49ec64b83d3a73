"""Web pages of other origins: kept out unless listed (security rule 26)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.runtime.service import StartError
from services.tokenizer.cross_origin import CrossOrigin
from tests.unit.tokenizer.backend_peers import Server, takes_requests
from tests.unit.tokenizer.http_client import Connection, EventReader, request
from tests.unit.tokenizer.scripts import OK

PAGE, EVIL = "https://page.example:8443", "https://evil.example"
ALLOW = "access-control-allow-origin"
TEXT_PATH = "/v1/completions"


@pytest.fixture(scope="module")
def listed(small_model_path: Path) -> Iterator[Server]:
    """A process with a key that lets one page in."""
    flags = ("--cors-origins", f"{PAGE},http://localhost:3000", "--api-key", "k")
    server = Server(small_model_path, *flags, is_ready=lambda port: takes_requests(port, Authorization="Bearer k"))
    server.backend.script = OK
    yield server
    server.close()


def test_sec_26_without_a_list_no_answer_says_anything_of_origins(server: Server) -> None:
    server.backend.script = OK
    for origin in (PAGE, "null", "http://127.0.0.1"):
        for response in (
            request(server.port, "POST", TEXT_PATH, {"prompt": "x"}, Origin=origin),
            request(server.port, "GET", "/live", Origin=origin),
            request(server.port, "GET", "/nothing", Origin=origin),
        ):
            assert not [name for name in response.headers if name.startswith("access-control")]
        preflight = request(server.port, "OPTIONS", TEXT_PATH, Origin=origin, Access_Control_Request_Method="POST")
        assert preflight.status == 405


def test_a_listed_page_may_ask_and_read_every_answer(listed: Server) -> None:
    key = {"Authorization": "Bearer k", "Origin": PAGE}
    for status, response in (
        (200, request(listed.port, "POST", TEXT_PATH, {"prompt": "x"}, **key)),
        (400, request(listed.port, "POST", TEXT_PATH, {"prompt": 5}, **key)),
        (404, request(listed.port, "GET", "/nothing", **key)),
        (401, request(listed.port, "GET", "/v1/models", Origin=PAGE)),
        (200, request(listed.port, "GET", "/live", Origin=PAGE)),
    ):
        assert response.status == status
        assert response.headers[ALLOW] == PAGE
        assert response.headers["vary"] == "Origin"
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in response.headers


def test_a_listed_page_may_read_a_stream(listed: Server) -> None:
    with Connection(listed.port) as connection:
        body = {"prompt": "x", "stream": True}
        connection.send("POST", TEXT_PATH, body, Authorization="Bearer k", Origin=PAGE)
        reader = EventReader(connection)
        assert reader.headers[ALLOW] == PAGE
        reader.rest()


def test_a_listed_page_may_ask_before_it_asks_without_a_key(listed: Server) -> None:
    with Connection(listed.port) as connection:
        connection.send(
            "OPTIONS", TEXT_PATH, Origin=PAGE, Access_Control_Request_Method="POST",
            Access_Control_Request_Headers="authorization,content-type,x-stainless-lang",
        )  # fmt: skip
        status, headers = connection.read_head()
    assert (status, headers[ALLOW]) == (204, PAGE)
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["access-control-allow-headers"].lower().startswith("authorization")
    assert "*" in headers["access-control-allow-headers"]


@pytest.mark.parametrize(
    "origin",
    [
        EVIL,
        "null",
        "",
        PAGE.upper(),
        PAGE + "/",
        PAGE + ".evil.example",
        "https://page.example",
        "http://page.example:8443",
        "*",
    ],
)
def test_sec_26_no_other_page_is_let_in(listed: Server, origin: str) -> None:
    response = request(listed.port, "GET", "/v1/models", Origin=origin, Authorization="Bearer k")
    assert ALLOW not in response.headers
    with Connection(listed.port) as connection:
        connection.send("OPTIONS", TEXT_PATH, Origin=origin, Access_Control_Request_Method="POST")
        _, headers = connection.read_head()
    assert not [name for name in headers if name.startswith("access-control")]


def test_options_that_is_no_question_of_a_browser_wants_a_key_as_ever(listed: Server) -> None:
    assert request(listed.port, "OPTIONS", TEXT_PATH, Origin=PAGE).status == 401


def test_all_origins_can_be_let_in(start_server: Callable[..., Server]) -> None:
    server = start_server("--cors-origins", "*")
    assert request(server.port, "GET", "/live", Origin=EVIL).headers[ALLOW] == "*"
    assert ALLOW not in request(server.port, "GET", "/live").headers


@pytest.mark.parametrize("text", ["page.example", "https://", "https://page.example/path", "https://a b", "://x"])
def test_what_is_no_origin_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(StartError, match="--cors-origins"):
        CrossOrigin(text)
