"""Many streams at once: kept-alive connections on asyncio, each answering one request at a time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from services.launcher.http.response import Response, ResponseError, ResponseParser
from services.launcher.http.server_address import ServerAddress


class Connection(asyncio.Protocol):
    """A kept-alive connection to one server. It says when each event arrived."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._address: ServerAddress | None = None

    @classmethod
    async def open(cls, server: str | ServerAddress) -> Connection:
        """Connects to a server.

        Raises:
            CommandError: the URL is none.
            OSError: nobody is there.
        """
        address = ServerAddress.parse(server) if isinstance(server, str) else server
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, address.host, address.port, ssl=address.tls())
        connection._address = address
        return connection

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

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
        if not self.is_open:
            raise ResponseError("the connection is closed")
        assert self._transport is not None
        assert self._address is not None
        content = b"" if body is None else json.dumps(body).encode()
        response = Response(time.perf_counter())
        self._parser = ResponseParser(response, on_event)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(self._address.request(method, path, content))
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
        except ResponseError as error:
            self._done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if exc is None and self._parser is not None and self._parser.end(time.perf_counter()):
            self._done.set_result(None)
        else:
            self._done.set_exception(ResponseError(f"the connection broke: {exc or 'closed by the server'}"))
