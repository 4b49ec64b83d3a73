"""Many streams at once: kept-alive connections on asyncio, each answering one request at a time.

A server may close a connection that it kept whenever it likes, also while the next request is on its way: whether that
one was read can't be known, but nothing of an answer has come. Such a request is sent once more on a new connection, as
browsers and client libraries do (RFC 9110, 9.2.2): all that is asked for here can be asked for twice. One whose answer
has begun is never sent again, nor one whose connection was new.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from services.launcher.http.response import Response, ResponseError, ResponseParser
from services.launcher.http.server_address import ServerAddress


class _NoAnswerError(ResponseError):
    """The connection broke before the first byte of an answer."""


class Connection:
    """A kept-alive connection to one server, made anew when the server has closed it. It says when each event came."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._link: _Link | None = None
        self._is_closed = False

    @classmethod
    async def open(cls, server: str | ServerAddress) -> Connection:
        """Connects to a server.

        Raises:
            CommandError: the URL is none.
            OSError: nobody is there.
        """
        connection = cls(ServerAddress.parse(server) if isinstance(server, str) else server)
        await connection._connect()
        return connection

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        on_event: Callable[[float], None] | None = None,
    ) -> Response:
        """Sends one request and waits for the end of its answer. Its times count from the first sending.

        Raises:
            ResponseError: `close` was called, or the connection broke before the end.
            OSError: the server closed a kept connection and takes no new one.
        """
        content = b"" if body is None else json.dumps(body).encode()
        request = self._address.request(method, path, content)
        sent_s = time.perf_counter()
        link = await self._open_link()
        try:
            return await link.exchange(request, Response(sent_s), on_event)
        except _NoAnswerError:
            if self._is_closed or not link.was_used:
                raise
        link = await self._connect()
        return await link.exchange(request, Response(sent_s), on_event)

    def close(self) -> None:
        """Closes it for good; a request that waits fails."""
        self._is_closed = True
        if self._link is not None:
            self._link.abort()

    async def _open_link(self) -> _Link:
        if self._is_closed:
            raise ResponseError("the connection is closed")
        if self._link is not None and self._link.is_open:
            return self._link
        return await self._connect()

    async def _connect(self) -> _Link:
        loop = asyncio.get_running_loop()
        address = self._address
        _, link = await loop.create_connection(_Link, address.host, address.port, ssl=address.tls())
        if self._is_closed:
            link.abort()
            raise ResponseError("the connection is closed")
        self._link = link
        return link


class _Link(asyncio.Protocol):
    """One connection of TCP, from its beginning to its end."""

    def __init__(self) -> None:
        self.was_used = False
        """Whether an answer came to its end here."""
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._has_begun = False

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, response: Response, on_event: Callable[[float], None] | None) -> Response:
        """Sends a request and fills its response; what ends otherwise leaves no connection that is open."""
        assert self._transport is not None
        if not self.is_open:
            raise _NoAnswerError(_broken(None))
        self._parser = ResponseParser(response, on_event)
        self._has_begun = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:  # also cancelled: the next answer would begin with the rest of this one
            self.abort()
            raise
        self.was_used = True
        if response.is_last:
            self._transport.close()
        return response

    def abort(self) -> None:
        """Closes it at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._parser is None or self._done is None or self._done.done():
            return
        self._has_begun = True
        try:
            if self._parser.feed(data, now_s):
                self._done.set_result(None)
        except ResponseError as error:
            self._done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if exc is None and self._parser is not None and self._parser.end(time.perf_counter()):
            self._done.set_result(None)
            return
        kind = ResponseError if self._has_begun else _NoAnswerError
        self._done.set_exception(kind(_broken(exc)))


def _broken(reason: Exception | None) -> str:
    return f"the connection broke: {reason or 'closed by the server'}"
