"""HTTP as it is on the wire, for tests: every byte of a response can be looked at."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import Any

from tests.sockets import DEADLINE_S

Json = dict[str, Any]


@dataclass
class Response:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Json:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> Json:
        """The error object, which must be in OpenAI's form."""
        value = self.json()
        assert set(value) == {"error"}
        error = value["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        assert self.headers["content-type"].startswith("application/json")
        return dict(error)


@dataclass
class Connection:
    """A client's socket."""

    port: int
    receive_buffer: int = 0
    sock: socket.socket = field(init=False)
    pending: bytes = b""

    def __post_init__(self) -> None:
        self.sock = socket.socket()
        if self.receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(("127.0.0.1", self.port))

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, method: str, path: str, body: object = None, **headers: str) -> None:
        """A request; a dict goes as JSON, bytes as they are."""
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = {"Host": "test"}
        if body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(payload))}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value)]
        self.sock.sendall("\r\n".join([*lines, "", ""]).encode() + payload)

    def fill(self, most: int = 65536) -> bytes:
        """More bytes; b"" at the end."""
        data = self.sock.recv(most)
        self.pending += data
        return data

    def read_until(self, mark: bytes) -> bytes:
        """Everything up to and with a mark."""
        while mark not in self.pending:
            assert self.fill(), f"closed before {mark!r}; got {self.pending[-300:]!r}"
        found, _, self.pending = self.pending.partition(mark)
        return found + mark

    def read_exactly(self, count: int) -> bytes:
        while len(self.pending) < count:
            assert self.fill(), "closed early"
        found, self.pending = self.pending[:count], self.pending[count:]
        return found

    def read_head(self) -> tuple[int, dict[str, str]]:
        lines = self.read_until(b"\r\n\r\n").decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in headers.items()}

    def read_chunk(self) -> bytes:
        """One transfer chunk; b"" is the last."""
        size = int(self.read_until(b"\r\n"), 16)
        data = self.read_exactly(size)
        assert self.read_exactly(2) == b"\r\n"
        return data

    def read_response(self) -> Response:
        status, headers = self.read_head()
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(iter(self.read_chunk, b""))
        else:
            body = self.read_exactly(int(headers["content-length"]))
        return Response(status, headers, body)

    def is_closed(self) -> bool:
        """Whether the server has ended the connection; waits for it."""
        try:
            return not self.pending and self.sock.recv(1) == b""
        except ConnectionResetError:
            return True


class EventReader:
    """The events of a streamed answer, one by one as they come, and all bytes of its body."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.status, self.headers = connection.read_head()
        self.body = b""
        self.pieces: list[bytes] = []
        self._pending = b""

    def next(self) -> str:
        """The next event or comment without its end; "" at the end of the body."""
        while b"\n\n" not in self._pending:
            piece = self.connection.read_chunk()
            if not piece:
                assert not self._pending
                return ""
            self.body += piece
            self.pieces.append(piece)
            self._pending += piece
        event, _, self._pending = self._pending.partition(b"\n\n")
        return event.decode()

    def next_json(self) -> Json:
        """The next event's object."""
        event = self.next()
        assert event.startswith("data: "), event
        value = json.loads(event.removeprefix("data: "))
        assert isinstance(value, dict)
        return value

    def rest(self) -> list[Json]:
        """The objects of all remaining events up to [DONE], which must be the last."""
        found: list[Json] = []
        while (event := self.next()) != "data: [DONE]":
            assert event.startswith("data: "), event
            assert "\n" not in event, event
            found.append(json.loads(event.removeprefix("data: ")))
        assert self.next() == ""
        assert self.body.endswith(b"data: [DONE]\n\n")
        assert self.body.count(b"[DONE]") == 1
        return found


def request(port: int, method: str, path: str, body: object = None, **headers: str) -> Response:
    """One request on a connection of its own."""
    with Connection(port) as connection:
        connection.send(method, path, body, **headers)
        return connection.read_response()


def metric(port: int, name: str, role: str = "tokenizer") -> float:
    """A sample of /metrics."""
    for line in request(port, "GET", "/metrics").body.decode().splitlines():
        if line.startswith(name + "{") and f'role="{role}"' in line:
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name}")


def text_of(events: list[Json], index: int = 0) -> str:
    """The text of one choice in the events of a stream."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)
