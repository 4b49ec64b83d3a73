"""A small HTTP client that says when each server-sent event arrived.

One connection answers one request at a time and is used again. It reads bytes as they come and leaves the JSON for
later, so that the client costs the machine under test as little as it can: about a tenth of what a general client does
per event.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit


class ResponseError(Exception):
    """The server broke the connection or the protocol; the message says how."""


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


class ResponseParser:
    """Bytes in, a `Response` filled. Pure; `feed` is told the time."""

    def __init__(self, response: Response, on_event: Callable[[float], None] | None = None) -> None:
        self._response = response
        self._on_event = on_event
        self._buffer = bytearray()
        self._text = bytearray()  # of the body: the beginning of an event, or all of it
        self._has_head = False
        self._is_chunked = False
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
            self._response.body = bytes(self._text)
            self._response.ended_s = now_s
        return is_complete

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
        if not self._is_chunked and not headers.get("content-length", "").isdigit():
            raise ResponseError("a response without a length")
        self._left = 0 if self._is_chunked else int(headers["content-length"])
        self._has_head = True
        return True

    def _read_length(self) -> bool:
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
            size = int(self._buffer[:end].split(b";")[0], 16)
            if size == 0:  # the last chunk: an empty line follows it
                return len(self._buffer) >= end + 4
            del self._buffer[: end + 2]
            self._left = size + 2

    def _take_text(self, num_bytes: int) -> None:
        self._text += self._buffer[:num_bytes]
        del self._buffer[:num_bytes]
        self._left -= num_bytes

    def _split_events(self, now_s: float) -> None:
        while (end := self._text.find(b"\n\n")) >= 0:
            event = bytes(self._text[:end])
            del self._text[: end + 2]
            if event.startswith(b"data: "):  # else a comment
                self._response.events.append((now_s, event[6:]))
                if self._on_event is not None:
                    self._on_event(now_s)


class Connection(asyncio.Protocol):
    """A kept-alive connection to one server."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._head = b""

    @classmethod
    async def open(cls, url: str) -> Connection:
        """Connects to the server of a `http://` URL."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ResponseError(f"{url} is not a http:// URL")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, parts.hostname, parts.port or 80)
        connection._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n".encode()
        return connection

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        on_event: Callable[[float], None] | None = None,
    ) -> Response:
        """Sends one request and waits for the end of its answer.

        Raises:
            ResponseError: the connection broke before.
        """
        if self._transport is None or self._transport.is_closing():
            raise ResponseError("the connection is closed")
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nContent-Length: {len(content)}\r\n".encode()
        response = Response(time.perf_counter())
        self._parser = ResponseParser(response, on_event)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head + self._head + b"\r\n" + content)
        await self._done
        return response

    def close(self) -> None:
        """Closes it; a request that waits fails."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._parser is None or self._done is None or self._done.done():
            return
        try:
            if self._parser.feed(data, now_s):
                self._done.set_result(None)
        except (ResponseError, ValueError) as error:
            self._done.set_exception(ResponseError(str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ResponseError(f"the connection broke: {exc or 'closed by the server'}"))
