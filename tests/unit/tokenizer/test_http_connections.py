"""What comes before a request is understood: heads, bodies, deadlines, sizes, things that are not HTTP."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.tokenizer.backend_peers import Server
from tests.unit.tokenizer.http_client import Connection, request
from tests.unit.tokenizer.scripts import OK

TEXT_PATH = "/v1/completions"


@pytest.fixture(scope="module")
def hasty(small_model_path: object) -> object:
    """A process with short deadlines and small bodies."""
    server = Server(small_model_path, "--head-timeout-s", "0.3", "--body-timeout-s", "0.3", "--max-body-bytes", "2000")  # type: ignore[arg-type]
    yield server
    server.close()


def test_a_head_that_does_not_come_is_408(hasty: Server) -> None:
    with Connection(hasty.port) as connection:
        connection.sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        response = connection.read_response()
        assert (response.status, response.error["code"]) == (408, "request_timeout")
        assert connection.is_closed()


def test_a_connection_that_says_nothing_is_closed_without_a_word(hasty: Server) -> None:
    with Connection(hasty.port) as connection:
        assert connection.is_closed()


def test_a_later_head_has_a_deadline_too_and_an_idle_connection_none_so_short(hasty: Server) -> None:
    with Connection(hasty.port) as connection, Connection(hasty.port) as silent:
        for each in (connection, silent):
            each.send("GET", "/live")
            assert each.read_response().status == 200
        connection.sock.sendall(b"GET /live HTTP/1.1\r\n")
        assert connection.read_response().status == 408
        assert connection.is_closed()
        silent.send("GET", "/live")
        assert silent.read_response().status == 200


def test_a_body_that_does_not_come_is_408(hasty: Server) -> None:
    with Connection(hasty.port) as connection:
        connection.send("POST", TEXT_PATH, b'{"prompt":', Content_Length="1000")
        response = connection.read_response()
        assert (response.status, response.error["code"]) == (408, "request_timeout")
        assert response.headers["connection"] == "close"


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_413(hasty: Server, is_chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * 3000}).encode()
    with Connection(hasty.port) as connection:
        if is_chunked:
            connection.send("POST", TEXT_PATH, b"", Content_Length="", Transfer_Encoding="chunked")
            connection.sock.sendall(b"%x\r\n%b\r\n" % (len(body), body))
        else:
            connection.send("POST", TEXT_PATH, body)
        response = connection.read_response()
        assert (response.status, response.error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "zzz", "gzip, gzip", "identity, GZIP", "x\t"])
@pytest.mark.parametrize("body", [gzip.compress(b'{"prompt": "x"}', mtime=0), b'{"prompt": "x"}', b"\x1f\x8bxxxx"])
def test_a_compressed_body_is_415_by_its_header(server: Server, coding: str, body: bytes) -> None:
    response = request(server.port, "POST", TEXT_PATH, body, Content_Encoding=coding)
    assert (response.status, response.error["code"]) == (415, "unsupported_media_type")
    assert "Content-Encoding" in response.error["message"]
    server.backend.script = OK
    for plain in ("identity", "Identity"):
        assert request(server.port, "POST", TEXT_PATH, b'{"prompt": "x"}', Content_Encoding=plain).status == 200


@pytest.mark.parametrize("path", [TEXT_PATH, "/v1/nothing", "/live"])
@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Content_Encoding": "gzip"}, b"\x1f\x8bxxxx"),
        ({"Content_Encoding": "deflate"}, b"\x00\x01"),
        ({"Transfer_Encoding": "chunked", "Content_Length": ""}, b"zz\r\nxx"),
        ({"Transfer_Encoding": "chunked", "Content_Length": ""}, b"3\r\nabcdef\r\n0\r\n\r\n"),
        ({"Transfer_Encoding": "chunked", "Content_Length": ""}, b'5\r\n{"pro\r\n0\r\nbad trailer\r\n\r\n'),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_broken_body_is_answered_and_writes_no_error_into_the_log(
    server: Server, path: str, headers: dict[str, str], body: bytes, is_late: bool
) -> None:
    server.lines.clear()
    with Connection(server.port) as connection:
        if is_late:  # the head alone, so that a route may have answered before the body breaks
            connection.send("POST", path, b"", **{"Content_Length": str(len(body)), **headers})
            connection.sock.sendall(body)
        else:
            connection.send("POST", path, body, **headers)
        response = connection.read_response()
        assert response.status in (400, 404, 405, 415)
        assert response.error["message"]
    assert request(server.port, "GET", "/live").status == 200
    assert not server.lines


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 9000,
        b"GET /" + b"y" * 9000 + b" HTTP/1.1\r\nHost: x",
        b"GET /live HTTP/1.1\r\nHost: x" + b"".join(b"\r\nX-%d: y" % number for number in range(100)),
    ],
)
def test_heads_over_the_limits_are_431(server: Server, head: bytes) -> None:
    with Connection(server.port) as connection:
        connection.sock.sendall(head + b"\r\n\r\n")
        response = connection.read_response()
        assert (response.status, response.error["code"]) == (431, "headers_too_large")
        assert connection.is_closed()


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello there\r\n\r\n",
        b"GET /live HTTP/9.9\r\n\r\n",
        b"POST /live HTTP/1.1\r\nContent-Length: minus\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /live HTTP/1.1\r\nBad header\r\n\r\n",
        bytes(range(256)) + b"\r\n\r\n",
    ],
)
def test_api_05_what_is_not_http_gets_the_error_body_and_is_closed(server: Server, junk: bytes) -> None:
    with Connection(server.port) as connection:
        connection.sock.sendall(junk)
        response = connection.read_response()
        assert (response.status, response.error["code"]) == (400, "invalid_http")
        assert connection.is_closed()
    assert request(server.port, "GET", "/live").status == 200


def test_a_client_that_asks_before_it_sends_is_told_to_go_on_or_refused(server: Server) -> None:
    server.backend.script = OK
    body = json.dumps({"prompt": "x"}).encode()
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, b"", Content_Length=str(len(body)), Expect="100-continue")
        assert connection.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sock.sendall(body)
        assert connection.read_response().status == 200
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, b"", Content_Length=str(2**30), Expect="100-continue")
        assert connection.read_response().status == 413
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, body, Expect="a miracle")
        assert connection.read_response().error["code"] == "expectation_failed"


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    server.backend.script = OK
    with Connection(server.port) as connection:
        for path in ("/live", "/v1/models", "/nowhere"):
            connection.send("GET", path)
        connection.send("POST", TEXT_PATH, {"prompt": "x"})
        assert [connection.read_response().status for _ in range(4)] == [200, 200, 404, 200]


def test_tok_09_a_huge_prompt_stops_neither_streams_nor_health(start_server: Callable[..., Server]) -> None:
    """Four texts of a megabyte are encoded while another client asks on: its answers must not wait for them."""
    server = start_server("--max-model-len", "1000000")
    server.backend.script = OK
    server.backend.tell_load(max_total_tokens=1_000_000)
    text = "The quick brown fox jumps over the lazy dog, 你好。\n" * 12_000
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(request, server.port, "POST", TEXT_PATH, {"prompt": text}) for _ in range(4)]
        num_answered = 0
        while not all(answer.done() for answer in answers):
            assert request(server.port, "GET", "/health").status == 200
            num_answered += 1
        assert all(answer.result().json()["usage"]["prompt_tokens"] > 500_000 for answer in answers)
    assert num_answered > 20
