"""One request at a time, waiting: for commands that ask a server something. Each request has a connection of its own.

Closing the connection is how an answer is given up: the server notices and frees what it held.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import closing

from services.launcher.http.response import Response, ResponseError, ResponseParser
from services.launcher.http.server_address import ServerAddress

_READ_BYTES = 65536
_CONNECT_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 60.0
_DONE = b"[DONE]"


class UnreachableError(ResponseError):
    """Nobody answers at the address."""


class KeyWantedError(ResponseError):
    """The server answers only who has a key, or another key."""


class Client:
    """Asks one server."""

    def __init__(self, address: ServerAddress, timeout_s: float = _ANSWER_TIMEOUT_S) -> None:
        """`timeout_s` is how long a whole answer may let wait; streams have no such limit."""
        self.address = address
        self._timeout_s = timeout_s

    def get(self, path: str) -> Response:
        """The whole answer to a GET, whatever its status.

        Raises:
            ResponseError: nobody is there, or the answer broke off.
        """
        return self._whole("GET", path, b"")

    def post(self, path: str, body: Mapping[str, object]) -> Response:
        """The whole answer to a POST of JSON, whatever its status; raises as `get`."""
        return self._whole("POST", path, json.dumps(body).encode())

    def models(self) -> list[str]:
        """The names in /v1/models; ResponseError when there is no such list."""
        match self._granted("/v1/models").json():
            case {"data": [*cards]}:
                return [str(card["id"]) for card in cards if isinstance(card, dict) and "id" in card]
        raise ResponseError(f"{self.address.url}/v1/models is not a list of models")

    def text(self, path: str) -> str:
        """The body of an answer to a GET; ResponseError when it is refused or no UTF-8."""
        try:
            return self._granted(path).body.decode()
        except UnicodeDecodeError:
            raise ResponseError(f"{self.address.url}{path} is not UTF-8 text") from None

    def first_model(self) -> str:
        """The first name in /v1/models; ResponseError when there is none."""
        names = self.models()
        if not names:
            raise ResponseError(f"{self.address.url} has no model")
        return names[0]

    def stream(self, path: str, body: Mapping[str, object]) -> Generator[bytes, None, None]:
        """The data of the events of an answer as they come, without the last `[DONE]`.

        To be closed when the rest is not wanted: that closes the connection.

        Raises:
            ResponseError: refused (the message has the server's reason), broken off, or no event stream.
        """
        with closing(self._connect()) as sock:
            response = Response(time.perf_counter())
            parser = ResponseParser(response)
            sock.settimeout(self._timeout_s)
            self._send(sock, "POST", path, json.dumps(body).encode())
            sock.settimeout(None)  # a long prompt is computed in silence; a person ends the wait
            num_given, is_complete = 0, False
            while not is_complete:
                is_complete = self._receive(sock, parser)
                for _, data in response.events[num_given:]:
                    if data != _DONE:
                        yield data
                num_given = len(response.events)
        if response.status != 200:
            raise ResponseError(response.refusal())
        if not response.is_event_stream:
            raise ResponseError(f"{self.address.url} does not stream: {response.headers.get('content-type')}")

    def _granted(self, path: str) -> Response:
        """The answer to a GET that is not refused."""
        response = self.get(path)
        if response.status in (401, 403):
            raise KeyWantedError(f"{self.address.url} wants a key, or another one: give it with --api-key")
        if response.status != 200:
            raise ResponseError(f"{self.address.url}{path}: {response.refusal()}")
        return response

    def _whole(self, method: str, path: str, content: bytes) -> Response:
        with closing(self._connect()) as sock:
            response = Response(time.perf_counter())
            parser = ResponseParser(response)
            sock.settimeout(self._timeout_s)
            self._send(sock, method, path, content)
            while not self._receive(sock, parser):
                pass
        return response

    def _connect(self) -> socket.socket:
        address = self.address
        try:
            if address.socket_path is not None:
                return _unix_socket(str(address.socket_path))
            sock = socket.create_connection((address.host, address.port), timeout=_CONNECT_TIMEOUT_S)
            context = address.tls()
            return sock if context is None else context.wrap_socket(sock, server_hostname=address.host)
        except (OSError, UnicodeError) as error:
            raise UnreachableError(f"cannot reach {address.url}: {_reason(error)}") from error

    def _send(self, sock: socket.socket, method: str, path: str, content: bytes) -> None:
        try:
            sock.sendall(self.address.request(method, path, content))
        except OSError as error:
            raise ResponseError(f"{self.address.url}: {_reason(error)}") from error

    def _receive(self, sock: socket.socket, parser: ResponseParser) -> bool:
        """Takes what comes; True at the end of the answer."""
        try:
            data = sock.recv(_READ_BYTES)
        except OSError as error:
            raise ResponseError(f"{self.address.url}: {_reason(error)}") from error
        now_s = time.perf_counter()
        if data:
            return parser.feed(data, now_s)
        if parser.end(now_s):
            return True
        raise ResponseError(f"{self.address.url} closed the connection before the end of its answer")


def _unix_socket(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_TIMEOUT_S)
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
