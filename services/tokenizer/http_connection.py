"""Tokenizer process: HTTP connections with the deadlines that aiohttp leaves to its user.

A connection gets so long for the head of its first request and of every later one that has begun; an idle one is closed
after a while; one whose client reads nothing of what lies ready is cut. What is not HTTP is answered in the error body
of the API, behind the answers to all that came before it. A request that is answered before its body has come is the
last of its connection. There is never more than one answer to a request. Owns no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import BadStatusLine
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo

from services.tokenizer.api_error import ApiError, Code
from services.tokenizer.connection_limits import ConnectionCounts, ConnectionLimits
from services.tokenizer.head_errors import closing_response, head_error, raw_response
from services.tokenizer.lingering import Lingering

IDLE_S = 75.0  # longer than the usual proxies keep a connection to us, or they would meet a closed one
SERVER_NAME = "tokenway"
_STALL_CHECKS = 4

logger = logging.getLogger(__name__)


class ClientConnection(RequestHandler):
    """One connection."""

    __slots__ = (
        "_address",
        "_counts",
        "_has_begun_head",
        "_head_timer",
        "_is_broken",
        "_is_last_request",
        "_limits",
        "_lingering",
        "_newest_body",
        "_num_unanswered",
        "_stall_timer",
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
        self._parser = HttpRequestParser(
            self,
            loop,
            self._read_bufsize,
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            max_headers=limits.max_headers,
            payload_exception=RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=1,  # it stops behind every request, or an error further on would take that request along
        )
        self._limits = limits
        self._counts = counts
        self._address = ""
        """Whose count this connection is in; "" for none."""
        self.is_control = is_control
        """Whether it came over the control listener."""
        self._num_unanswered = 0
        """Requests that have come and are not answered; what is not HTTP counts as one, and is the last."""
        self._has_begun_head = False
        """Whether a part of a next head has come."""
        self._newest_body: StreamReader = EMPTY_PAYLOAD
        """What the newest head announced: a body that breaks is this one."""
        self._is_broken = False
        """Whether nothing that comes can be understood any more."""
        self._lingering: Lingering | None = None
        """Once nothing more is answered."""
        self._is_last_request = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self.on_writable: Callable[[], None] | None = None
        """Called when the client has caught up after `writing_paused`."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a next request has arrived."""
        return not self.has_open_request and not self._has_begun_head

    @property
    def has_open_request(self) -> bool:
        """Whether a request is being answered, or waits for it."""
        return self._num_unanswered > 0

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
            self.transport.write(raw_response(error, "Service Unavailable"))
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
        if self._lingering is not None:
            self._lingering.cancel()
        self.on_writable = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head or a body; none when parsing goes on that was held up."""
        if self._lingering is not None:
            self._lingering.hear()
        elif not self._is_broken:
            is_between = self._newest_body.is_eof()
            if self._parse(data):
                self._has_begun_head = False
                self._cancel_head_timer()
            elif data and is_between:
                self._has_begun_head = True
                self._await_head()

    def _parse(self, data: bytes) -> bool:
        """Parses what has come, request by request; whether any began in it, or turned out to be none."""
        has_begun = self._parse_once(data)
        is_more = True
        while is_more and not (self._is_broken or self._reading_paused or self._has_full_queue):
            is_more = self._parse_once(b"")  # the parser may have stopped behind a request, with bytes left
            has_begun = has_begun or is_more
        return has_begun

    @property
    def _has_full_queue(self) -> bool:
        return len(self._messages) >= self._max_msg_queue_size

    def _parse_once(self, data: bytes) -> bool:
        """Parses up to the end of one request at most; whether one has begun, or something that is none."""
        num_before = len(self._messages)
        super().data_received(data)
        if len(self._messages) == num_before:
            return False
        self._judge_newest()
        return True

    def _judge_newest(self) -> None:
        """What the newest in the queue is: a request, one of another age, the end of its body, or no request at all."""
        head, body = self._messages[-1]
        if isinstance(head, RawRequestMessage):
            self._num_unanswered += 1
            self._newest_body = body
            if head.version not in (HttpVersion10, HttpVersion11):
                self._is_broken = True
                self._messages[-1] = _ErrInfo(400, BadStatusLine(""), "another version of HTTP"), EMPTY_PAYLOAD
            return
        self._is_broken = True
        if self._newest_body.is_eof():
            self._num_unanswered += 1
        else:  # aiohttp would answer it behind that request, which answers with it itself
            self._messages.pop()
            self._newest_body.set_exception(RequestPayloadError("the body cannot be read"))

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
        """Writes what is not written yet of a response; afterwards the next head is awaited, or nothing any more."""
        if self._upgraded and not self._messages:
            self._decline_upgrade()
        is_last = not request.content.is_eof() or (self._is_broken and self._num_unanswered <= 1)
        if not resp.prepared:
            resp.headers["Server"] = SERVER_NAME
            if is_last:
                resp.force_close()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._num_unanswered -= 1
            self.on_writable = None
            if is_last:
                self._linger()
            elif self._is_last_request:
                self.close()
            elif self._has_begun_head:
                self._await_head()

    def _decline_upgrade(self) -> None:
        """What came behind a wish for another protocol is HTTP: aiohttp would parse it by itself, unjudged."""
        assert self._parser is not None
        self._parser.set_upgraded(False)
        self._upgraded = False
        tail, self._message_tail = self._message_tail, b""
        self.data_received(tail)
        if self._buffer_paused:
            self._resume_reading_if_drained()

    def _linger(self) -> None:
        """Answers nothing more on this connection, and closes it when its client has stopped sending."""
        self._force_close = True  # ends aiohttp's own loop and leaves the transport to us
        if self._waiter is not None:
            self._waiter.cancel()
        self._cancel_head_timer()
        self._has_begun_head = False
        if self.transport is not None and self._lingering is None:
            self._lingering = Lingering(self._loop, self.transport)
            self._resume_transport_reading()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is not HTTP, or not within the limits."""
        if request.writer.output_size > 0:
            raise ConnectionResetError("a broken request behind an answered one")
        return closing_response(head_error(exc, message))

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Called for what escapes while a request is ended; a broken body there is the client's doing, and answered."""
        if isinstance(kw.get("exc_info"), RequestPayloadError):
            logger.debug("the rest of a body cannot be read: %s", kw["exc_info"])
        else:
            super().log_exception(*args, **kw)

    def _await_head(self) -> None:
        """Counts from now, unless it counts already or requests are to be answered first."""
        if self._head_timer is None and not self.has_open_request:
            self._head_timer = self._loop.call_later(self._limits.head_timeout_s, self._give_up_head)

    def _give_up_head(self) -> None:
        self._head_timer = None
        if self.transport is None or self.transport.is_closing():
            return
        if not self._has_begun_head:
            self.force_close()
            return
        error = ApiError(408, "the head of the request did not arrive in time", code=Code.REQUEST_TIMEOUT)
        self.transport.write(raw_response(error, "Request Timeout"))
        self._linger()

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
