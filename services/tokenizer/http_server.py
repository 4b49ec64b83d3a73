"""Tokenizer process: makes the connections of a listener, and requests whose responses have the headers of all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from services.tokenizer.connection_limits import ConnectionCounts, ConnectionLimits
from services.tokenizer.http_connection import ClientConnection

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
ResponseHeaders = Callable[[web.BaseRequest], Mapping[str, str]]


class ClientRequest(web.BaseRequest):
    """A request whose response gets the headers that every response to it needs, however it is made."""

    response_headers: Mapping[str, str] = MappingProxyType({})

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        response.headers.update(self.response_headers)


class HttpServer(web.Server):
    """Makes connections; handlers are cancelled when their client leaves."""

    def __init__(
        self, handler: Handler, limits: ConnectionLimits, response_headers: ResponseHeaders, *, is_control: bool = False
    ) -> None:
        """Inside a running event loop.

        Args:
            handler: Answers every request.
            limits: What clients may do.
            response_headers: What every response to a request has to carry.
            is_control: Whether this is the control listener.
        """
        super().__init__(handler, request_factory=self._new_request, handler_cancellation=True)
        self.counts = ConnectionCounts(limits)
        self._limits = limits
        self._response_headers = response_headers
        self._is_control = is_control
        self._own_loop = asyncio.get_running_loop()

    def __call__(self) -> ClientConnection:
        """A connection's protocol."""
        return ClientConnection(self, self._own_loop, self._limits, self.counts, self._is_control)

    def close_idle(self) -> None:
        """Closes the connections that nobody uses now, and lets the others end with their present request."""
        for connection in self.connections:
            if not isinstance(connection, ClientConnection) or connection.is_idle:
                connection.force_close()
            elif connection.has_open_request:
                connection.end_after_request()

    def _new_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        request = ClientRequest(
            message, payload, protocol, writer, task, self._own_loop, client_max_size=self._limits.max_body_bytes
        )
        request.response_headers = self._response_headers(request)
        return request
