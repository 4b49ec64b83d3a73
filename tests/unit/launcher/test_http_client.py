"""Addresses of servers, and one request at a time to them."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.launcher.errors import CommandError
from services.launcher.http.client import Client, UnreachableError
from services.launcher.http.response import ResponseError
from services.launcher.http.server_address import ServerAddress
from tests.unit.launcher.openai_server import openai_server


@pytest.mark.parametrize(
    ("url", "expected", "path"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", "/x"),
        ("http://localhost:8000/", "http://localhost:8000", "/x"),
        ("http://localhost/v1", "http://localhost", "/x"),
        ("https://api.example.com/v1/", "https://api.example.com", "/x"),
        ("https://example.com:8443/proxy/v1", "https://example.com:8443/proxy", "/proxy/x"),
        ("http://[::1]:8000", "http://[::1]:8000", "/x"),
    ],
)
def test_a_url_is_taken_as_people_write_it(url: str, expected: str, path: str) -> None:
    address = ServerAddress.parse(url, "key")
    assert address.url == expected
    head = address.request("POST", "/x", b"{}").decode().split("\r\n")
    assert head[0] == f"POST {path} HTTP/1.1"
    assert f"Host: {expected.split('://')[1].split('/')[0]}" in head
    assert {"Authorization: Bearer key", "Content-Length: 2"} <= set(head)
    assert head[-1] == "{}"
    assert isinstance(address.tls(), ssl.SSLContext) == url.startswith("https")
    assert "key" not in repr(address)


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://x", "http://x:port", "http://x:70000", "http://x?y", "http://ex ample", "http://例え"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(CommandError, match="--url"):
        ServerAddress.parse(url)


@pytest.mark.parametrize("key", ["a\r\nX-Admin: 1", "a b", "ключ"])
def test_a_key_cannot_make_another_header(key: str) -> None:
    with pytest.raises(CommandError, match="the API key"):
        ServerAddress.parse("http://x", key)


@contextmanager
def answering(answer: bytes, path: Path | None = None) -> Iterator[tuple[ServerAddress, list[bytes]]]:
    """A socket that reads one request, sends these bytes and closes."""
    listener = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
    listener.bind(("127.0.0.1", 0) if path is None else str(path))
    listener.listen()
    received: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            received.append(connection.recv(65536))
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        port = listener.getsockname()[1] if path is None else 0
        yield (
            ServerAddress.parse(f"http://127.0.0.1:{port}") if path is None else ServerAddress.of_socket(path),
            received,
        )
        thread.join()


def test_a_unix_socket_is_asked_as_a_port_is(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with answering(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}', path) as (address, received):
        assert Client(address).get("/trace/x").json() == {"a": 1}
    assert received[0].startswith(b"GET /trace/x HTTP/1.1\r\nHost: localhost\r\n")
    path.unlink()
    with pytest.raises(UnreachableError, match=f"cannot reach {path}: No such file"):
        Client(address).get("/")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "closed the connection before the end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhal", "closed the connection before the end"),
        (b"SSH-2.0\r\n\r\n", "no HTTP response"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(answer: bytes, problem: str) -> None:
    with answering(answer) as (address, _), pytest.raises(ResponseError, match=problem):
        Client(address).get("/")
    with answering(answer) as (address, _), pytest.raises(ResponseError, match=problem):
        list(Client(address).stream("/x", {}))


def test_an_answer_that_is_no_stream_is_an_error() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    with answering(answer) as (address, _), pytest.raises(ResponseError, match="does not stream: application/json"):
        list(Client(address).stream("/x", {}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "two\\nlines"}}', "status 400: two lines"),
        (b'{"error": "text"}', "status 400: text"),
        (b"<html>", "status 400: b'<html>'"),
    ],
)
def test_a_refusal_is_one_line(body: bytes, message: str) -> None:
    answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with answering(answer) as (address, _), pytest.raises(ResponseError) as caught:
        list(Client(address).stream("/x", {"a": "你"}))
    assert str(caught.value) == message


def test_models_are_listed() -> None:
    with openai_server() as server:
        client = Client(ServerAddress.parse(server.url))
        assert client.models() == ["model-a", "model-b"]
        assert client.first_model() == "model-a"
        server.models = ()
        with pytest.raises(ResponseError, match="has no model"):
            client.first_model()
        assert json.loads(client.get("/nope").body)["error"]["message"] == "there is no /nope here"


def test_closing_a_stream_closes_its_connection() -> None:
    """That is how a server learns that nobody reads its answer any more."""
    listener = socket.create_server(("127.0.0.1", 0))
    closed = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
            if connection.recv(1) == b"":
                closed.set()

    thread = threading.Thread(target=serve)
    thread.start()
    stream = Client(ServerAddress.parse(f"http://127.0.0.1:{listener.getsockname()[1]}")).stream("/x", {})
    assert next(stream) == b"1"
    stream.close()
    assert closed.wait(20)
    thread.join()
    listener.close()
