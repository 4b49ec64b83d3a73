"""An HTTP response with server-sent events, read from bytes as they come. Pure: no socket, no clock.

JSON is left for later, so that a client which measures a server costs the machine under test as little as it can:
about a tenth of what a general client does per event.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from services.launcher.errors import CommandError

_NO_BODY = (204, 304)


class ResponseError(CommandError):
    """The server broke the connection or the protocol, or refused; the message says how."""


@dataclass(slots=True)
class Response:
    """One answer. For an event stream `events` holds each event's data and its time; else `body` holds all.

    Times are those of `time.perf_counter`.
    """

    sent_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytes = b""
    ended_s: float = 0.0

    @property
    def is_event_stream(self) -> bool:
        """Whether the server announced server-sent events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_last(self) -> bool:
        """Whether the server said that it closes the connection behind this answer."""
        return "close" in (word.strip() for word in self.headers.get("connection", "").lower().split(","))

    def json(self) -> object:
        """The body's JSON value; ResponseError when it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise ResponseError(f"the answer is not JSON: {self.body[:80]!r}") from None

    def refusal(self) -> str:
        """What a status other than 200 means, in one line: the message of the API's error body if there is one."""
        return f"status {self.status}: {error_message(self.body)}"


def error_message(body: bytes) -> str:
    """The message in an error body of the OpenAI form; what can be read of it when it has another."""
    try:
        error = json.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
        return " ".join(str(message).split())
    except (ValueError, KeyError, TypeError):
        return repr(body[:200])


class ResponseParser:
    """Bytes in, a `Response` filled. `feed` is told the time."""

    def __init__(self, response: Response, on_event: Callable[[float], None] | None = None) -> None:
        self._response = response
        self._on_event = on_event
        self._buffer = bytearray()
        self._text = bytearray()  # of the body: the beginning of an event, or all of it
        self._has_head = False
        self._is_chunked = False
        self._ends_with_connection = False
        self._left = 0  # bytes of the chunk, or of the body, that are still to come

    def feed(self, data: bytes, now_s: float) -> bool:
        """Takes what arrived; True once the response is complete.

        Raises:
            ResponseError: it is no HTTP response that this client knows.
        """
        self._buffer += data
        if not self._has_head and not self._read_head():
            return False
        is_complete = self._read_chunks() if self._is_chunked else self._read_length()
        if self._response.is_event_stream:
            self._split_events(now_s)
        if is_complete:
            self._complete(now_s)
        return is_complete

    def end(self, now_s: float) -> bool:
        """The server closed the connection; True when that is how this response ends."""
        if self._has_head and self._ends_with_connection:
            self._complete(now_s)
            return True
        return False

    def _complete(self, now_s: float) -> None:
        self._response.body = bytes(self._text)
        self._response.ended_s = now_s

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        status_line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        words = status_line.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise ResponseError(f"no HTTP response: {status_line[:80]!r}")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._response.status, self._response.headers = int(words[1]), headers
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = "0" if int(words[1]) in _NO_BODY else headers.get("content-length", "")
        self._ends_with_connection = not self._is_chunked and not length.isdigit()
        self._left = int(length) if length.isdigit() and not self._is_chunked else 0
        self._has_head = True
        return True

    def _read_length(self) -> bool:
        if self._ends_with_connection:
            self._text += self._buffer
            self._buffer.clear()
            return False
        self._take_text(min(self._left, len(self._buffer)))
        return self._left == 0

    def _read_chunks(self) -> bool:
        while True:
            if self._left > 2:  # of the chunk and the line end behind it
                self._take_text(min(self._left - 2, len(self._buffer)))
                if self._left > 2:
                    return False
            if len(self._buffer) < self._left:
                return False
            del self._buffer[: self._left]
            self._left = 0
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return False
            size = self._chunk_size(bytes(self._buffer[:end]))
            if size == 0:  # the last chunk: an empty line follows it
                return len(self._buffer) >= end + 4
            del self._buffer[: end + 2]
            self._left = size + 2

    @staticmethod
    def _chunk_size(line: bytes) -> int:
        digits = line.split(b";")[0].strip()
        if not digits or digits.strip(b"0123456789abcdefABCDEF"):
            raise ResponseError(f"no size of a chunk: {line[:40]!r}")
        return int(digits, 16)

    def _take_text(self, num_bytes: int) -> None:
        self._text += self._buffer[:num_bytes]
        del self._buffer[:num_bytes]
        self._left -= num_bytes

    def _split_events(self, now_s: float) -> None:
        while (end := self._event_end()) is not None:
            event = bytes(self._text[: end[0]])
            del self._text[: end[1]]
            data = event_data(event)
            if data is not None:
                self._response.events.append((now_s, data))
                if self._on_event is not None:
                    self._on_event(now_s)

    def _event_end(self) -> tuple[int, int] | None:
        """Where the first event ends and where the next begins; lines end in LF, or in CRLF with some servers."""
        plain, long = self._text.find(b"\n\n"), self._text.find(b"\r\n\r\n")
        if long >= 0 and (plain < 0 or long < plain):
            return long, long + 4
        return (plain, plain + 2) if plain >= 0 else None


def event_data(event: bytes) -> bytes | None:
    """The data of one event; None for a comment and for an event without data."""
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly always
        return event[6:]
    lines = [line.removeprefix(b"data:").removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
