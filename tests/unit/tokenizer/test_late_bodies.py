"""Requests answered before their bodies came, and what is no request behind one: one answer each, then the end."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.sockets import wait_until
from tests.unit.tokenizer.backend_peers import Server, takes_requests
from tests.unit.tokenizer.http_client import Connection, Response, metric, request
from tests.unit.tokenizer.scripts import OK
from tests.unit.tokenizer.test_encryption import Files, connect, make_files

TEXT_PATH = "/v1/completions"
LATE = {"Content_Length": "50"}


@pytest.fixture(scope="module")
def hasty(small_model_path: Path) -> Iterator[Server]:
    flags = ("--head-timeout-s", "0.4", "--body-timeout-s", "0.4", "--max-body-bytes", "2000")
    server = Server(small_model_path, *flags)
    yield server
    server.close()


def only_answer(connection: Connection) -> Response:
    """The one response that comes until the server has ended the connection."""
    response = connection.read_response()
    assert response.headers["connection"] == "close"
    while connection.fill():
        pass
    assert connection.pending == b""
    return response


@pytest.mark.parametrize("parts", [[], [b"x"], [b"x" * 21, b"x" * 29], [b"x" * 50], [b"x" * 80]])
@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/nope", LATE, 404),
        ("/live", LATE, 405),
        (TEXT_PATH, {**LATE, "Content_Type": "text/plain"}, 415),
        (TEXT_PATH, {"Content_Length": "3000"}, 413),
        (TEXT_PATH, {**LATE, "Expect": "a miracle"}, 417),
    ],
)
def test_an_answer_before_the_body_is_the_only_one(
    hasty: Server, path: str, headers: dict[str, str], status: int, parts: list[bytes]
) -> None:
    with Connection(hasty.port) as connection:
        connection.send("POST", path, b"", **headers)
        response = connection.read_response()
        assert (response.status, response.headers["connection"]) == (status, "close")
        for part in parts:
            connection.sock.sendall(part)
        while connection.fill():
            pass
        assert connection.pending == b""


def test_a_body_that_stops_has_one_408(hasty: Server) -> None:
    for sent in (b"", b'{"prompt'):
        with Connection(hasty.port) as connection:
            connection.send("POST", TEXT_PATH, sent, **LATE)
            assert only_answer(connection).status == 408


def test_a_connection_ends_soon_after_its_last_answer_also_when_its_client_stays(hasty: Server) -> None:
    wait_until(lambda: metric(hasty.port, "tokenway:tokenizer_connections") == 1)  # the one that asks
    with ExitStack() as stack:
        for path, length in ((TEXT_PATH, 50), (TEXT_PATH, 3000), ("/nope", 50)):
            client = stack.enter_context(Connection(hasty.port))
            client.send("POST", path, b"", Content_Length=str(length))
            assert client.read_response().status in (404, 408, 413)
        wait_until(lambda: metric(hasty.port, "tokenway:tokenizer_connections") == 1, within_s=6)


def test_a_client_that_sends_much_before_it_reads_gets_its_answer_whole(hasty: Server) -> None:
    with Connection(hasty.port) as connection:
        connection.send("POST", "/nope", b"x" * 8_000_000)
        assert only_answer(connection).error["code"] == "not_found"


def test_under_encryption_too(small_model_path: Path, tmp_path: Path) -> None:
    files: Files = make_files(tmp_path, "-nodes")

    def is_ready(port: int) -> bool:
        with connect(port, files) as connection:
            connection.send("POST", TEXT_PATH, b"{", Authorization="Bearer one")
            return connection.read_response().status == 400

    flags = ("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--head-timeout-s", "0.4", "--api-key", "one")
    server = Server(small_model_path, *flags, is_ready=is_ready)
    try:
        for sent in (b"", b"x"):
            with connect(server.port, files) as connection:
                connection.send("POST", TEXT_PATH, b"", **LATE)
                response = connection.read_response()
                assert (response.status, response.headers["connection"]) == (401, "close")
                connection.sock.sendall(sent)
                try:
                    while connection.fill():
                        pass
                except (ssl.SSLEOFError, ConnectionResetError):
                    pass
                assert connection.pending == b""
    finally:
        server.close()


JUNK = [b"GARBAGE\r\n\r\n", b"xyz", b"\x00", b"GET /\r\n\r\n", b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n"]


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_no_request_takes_nothing_from_the_one_before_it(server: Server, junk: bytes, is_late: bool) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    with Connection(server.port) as connection:
        if is_late:
            connection.send("POST", TEXT_PATH, body)
            (submit,) = server.backend.take_submits()
            connection.sock.sendall(junk)
            wait_until(lambda: takes_requests(server.port))
            server.backend.admit(submit)
            server.backend.send_text(OK(submit)[0])
        else:
            server.backend.script = OK
            connection.send("POST", TEXT_PATH, body + junk, Content_Length=str(len(body)))
        assert connection.read_response().status == 200
        assert only_answer(connection).error["code"] == "invalid_http"


@pytest.mark.parametrize("version", ["", " HTTP/0.9", " HTTP/2.0", " HTTP/3.0"])
def test_other_versions_of_http_are_400_in_ours(server: Server, version: str) -> None:
    with Connection(server.port) as connection:
        connection.sock.sendall(f"GET /live{version}\r\n\r\n".encode())
        assert connection.fill().startswith(b"HTTP/1.")
        response = connection.read_response()
        assert (response.status, response.error["code"]) == (400, "invalid_http")
        assert connection.is_closed()


def test_requests_behind_a_wish_for_another_protocol_are_answered(server: Server) -> None:
    later = b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\nGET /live HTTP/1.1\r\nHost: x\r\n\r\nxyz"
    with Connection(server.port) as connection:
        wish = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        connection.sock.sendall(wish + later)
        assert [connection.read_response().status for _ in range(4)] == [200, 404, 200, 400]
        assert connection.is_closed()


def test_a_half_head_that_came_during_a_request_has_its_time_too(hasty: Server) -> None:
    with Connection(hasty.port) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": "x"})
        (submit,) = hasty.backend.take_submits()
        connection.sock.sendall(b"GET /live HT")
        wait_until(lambda: request(hasty.port, "GET", "/live").status == 200)
        hasty.backend.admit(submit)
        hasty.backend.send_text(OK(submit)[0])
        assert connection.read_response().status == 200
        assert only_answer(connection).status == 408
