"""Tokenizer process: HTTP connections with the deadlines that aiohttp leaves to its user.

A connection gets so long for the head of its first request and of every later one that has begun; an idle one is closed
after a while; one whose client reads nothing of what lies ready is cut. What is not HTTP is answered in the error body
of the API. Owns no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from services.tokenizer.api_error import ApiError, Code
from services.tokenizer.connection_limits import ConnectionCounts, ConnectionLimits

IDLE_S = 75.0  # longer than the usual proxies keep a connection to us, or they would meet a closed one
SERVER_NAME = "tokenway"
_STALL_CHECKS = 4

logger = logging.getLogger(__name__)
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


ResponseHeaders = Callable[[web.BaseRequest], Mapping[str, str]]


class ClientRequest(web.BaseRequest):
    """A request whose response gets the headers that every response to it needs, however it is made."""

    response_headers: Mapping[str, str] = MappingProxyType({})

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        response.headers.update(self.response_headers)


class ClientConnection(RequestHandler):
    """One connection."""

    __slots__ = (
        "_address",
        "_counts",
        "_has_received",
        "_head_timer",
        "_is_last_request",
        "_limits",
        "_newest_body",
        "_stall_timer",
        "has_open_request",
        "is_control",
        "on_writable",
    )

    def __init__(
        self,
        manager: web.Server,
        loop: asyncio.AbstractEventLoop,
        limits: ConnectionLimits,
        counts: ConnectionCounts,
        is_control: bool,
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=IDLE_S,
            auto_decompress=False,  # a compressed body is refused by its header
            access_log=None,  # type: ignore[arg-type]  # None is aiohttp's own way to switch it off
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            max_headers=limits.max_headers,
        )
        self._limits = limits
        self._counts = counts
        self._address = ""
        """Whose count this connection is in; "" for none."""
        self.is_control = is_control
        """Whether it came over the control listener."""
        self.has_open_request = False
        """Whether a request is being answered."""
        self._has_received = False
        self._newest_body: StreamReader | None = None
        """What the newest head announced: a body that breaks is this one."""
        self._is_last_request = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self.on_writable: Callable[[], None] | None = None
        """Called when the client has caught up after `writing_paused`."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a next request has arrived."""
        return not self.has_open_request and not self._has_received

    def begin_request(self) -> None:
        """A whole head has arrived."""
        self.has_open_request = True
        self._cancel_head_timer()

    def end_after_request(self) -> None:
        """Closes the connection when the present request is answered; what is still to come of its body is taken."""
        self._is_last_request = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected: the first head is awaited, unless there are too many of them."""
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        problem = ""
        if isinstance(peer, tuple):
            self._address = str(peer[0])
            problem = self._counts.enter(self._address)
        if problem and self.transport is not None:
            error = ApiError(503, problem, code=Code.TOO_MANY_CONNECTIONS, retry_after_s=1)
            self.transport.write(_raw_response(error, "Service Unavailable"))
            self.force_close()
        else:
            self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client is gone; a running handler is cancelled."""
        if self._address:
            self._counts.leave(self._address)
            self._address = ""
        self._cancel_head_timer()
        self._cancel_stall_timer()
        self.on_writable = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head or a body."""
        if not self.has_open_request:
            self._has_received = True
            if self._head_timer is None:
                self._await_head()
        super().data_received(data)
        self._fail_broken_body()

    def _fail_broken_body(self) -> None:
        """Tells the request whose body broke off in its chunks: aiohttp only queues the error behind that request."""
        for head, body in self._messages:
            if isinstance(head, RawRequestMessage):
                self._newest_body = body
            elif self._newest_body is not None and not self._newest_body.is_eof():
                self._messages.pop()  # an error is the last there is; the request itself answers with it
                self._newest_body.set_exception(RequestPayloadError("the body cannot be read"))
                self.close()  # after that answer: what follows has no beginning
                return

    def pause_writing(self) -> None:
        """The client has left a buffer full of bytes lying."""
        super().pause_writing()
        self._watch_for_stall()

    def resume_writing(self) -> None:
        """It has taken most of them."""
        super().resume_writing()
        self._cancel_stall_timer()
        if self.on_writable is not None:
            self.on_writable()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Writes what is not written yet of a response; afterwards the next head is awaited."""
        if not resp.prepared:
            resp.headers["Server"] = SERVER_NAME
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.has_open_request = False
            self._has_received = False
            self.on_writable = None
            if self._is_last_request:
                self.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is not HTTP, or not within the limits."""
        self._cancel_head_timer()
        if request.writer.output_size > 0:
            raise ConnectionResetError("a broken request behind an answered one")
        response = error_response(_head_error(exc, message))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Called for what escapes while a request is ended; a broken body there is the client's doing, and answered."""
        if isinstance(kw.get("exc_info"), RequestPayloadError):
            logger.debug("the rest of a body cannot be read: %s", kw["exc_info"])
        else:
            super().log_exception(*args, **kw)

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self._limits.head_timeout_s, self._give_up_head)

    def _give_up_head(self) -> None:
        self._head_timer = None
        if self._has_received and self.transport is not None:
            error = ApiError(408, "the head of the request did not arrive in time", code=Code.REQUEST_TIMEOUT)
            self.transport.write(_raw_response(error, "Request Timeout"))
        self.force_close()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_for_stall(self) -> None:
        transport = self.transport
        if transport is None:
            return
        left_bytes = transport.get_write_buffer_size()
        self._stall_timer = self._loop.call_later(
            self._limits.write_timeout_s / _STALL_CHECKS, self._check_stall, left_bytes, _STALL_CHECKS
        )

    def _check_stall(self, left_bytes: int, checks_left: int) -> None:
        """Nothing is written while a client is behind, so the buffer only shrinks, and it does if the client reads."""
        transport = self.transport
        if transport is None:
            return
        if transport.get_write_buffer_size() < left_bytes:
            self._watch_for_stall()
            return
        if checks_left <= 1:
            logger.info("cut a connection whose client read nothing for %.0f s", self._limits.write_timeout_s)
            transport.abort()
            return
        self._stall_timer = self._loop.call_later(
            self._limits.write_timeout_s / _STALL_CHECKS, self._check_stall, left_bytes, checks_left - 1
        )

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


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


class ChunkedOutput:
    """Event bytes straight to the socket's transport: no task wakes up and nothing is awaited for a token."""

    __slots__ = ("_connection", "_is_chunked", "_transport")

    def __init__(self, connection: ClientConnection, is_chunked: bool) -> None:
        """`is_chunked`: whether the response is in chunked transfer coding (HTTP/1.1)."""
        self._connection = connection
        self._transport = connection.transport
        self._is_chunked = is_chunked

    @property
    def is_blocked(self) -> bool:
        """Whether the client is a buffer behind."""
        return self._connection.writing_paused

    def write(self, data: bytes) -> None:
        """Writes one transfer chunk in one piece."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def cut(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            logger.info("cut a connection whose client is too far behind")
            self._transport.abort()


def error_response(error: ApiError) -> web.Response:
    """An error as a response."""
    return web.Response(
        status=error.status, body=error.body(), content_type="application/json", headers=error.headers()
    )


def _head_error(exc: BaseException | None, message: str | None) -> ApiError:
    if isinstance(exc, LineTooLong) or "Too many headers" in (message or ""):
        return ApiError(431, "the head of the request is too large", code=Code.HEADERS_TOO_LARGE)
    return ApiError(400, "the request is not valid HTTP", code=Code.INVALID_HTTP)


def _raw_response(error: ApiError, reason: str) -> bytes:
    body = error.body()
    head = f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in error.headers().items())
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
