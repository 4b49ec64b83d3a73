"""Tokenizer process: the boundary at which every request comes in and every failure becomes its API's error body.

A table of paths (`routes`), not a framework: an unknown path, a wrong method and an exception of ours are answered in
the same form as a wrong field. Whatever goes wrong in one request stays in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from services.tokenizer.access import Access, Audience, not_found
from services.tokenizer.answer_ids import id_headers
from services.tokenizer.api_error import ApiError, Code, internal_error
from services.tokenizer.backend_view import BackendView
from services.tokenizer.connection_limits import ConnectionLimits, check_head
from services.tokenizer.cross_origin import CrossOrigin
from services.tokenizer.handlers import Handler
from services.tokenizer.http_connection import ClientConnection
from services.tokenizer.instruments import HttpStatistics
from services.tokenizer.request_record import RequestRecord, present_record
from services.tokenizer.request_watch import RequestWatch
from services.tokenizer.routes import Route, find_route, openai_error_body

_CLIENT_GONE = 499
_UNCOUNTED = frozenset({Audience.ANYONE, Audience.METRICS})  # no work that a key's budget would pay
_NO_FAULTS = (503, 504)  # refused, ended by somebody, or by the client's own deadline

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gate:
    """What stands before every route, and what is written down behind it."""

    access: Access
    origins: CrossOrigin
    limits: ConnectionLimits
    watch: RequestWatch


class HttpApi:
    """Answers every request of both listeners."""

    def __init__(self, handlers: Mapping[str, Handler], gate: Gate, view: BackendView, http: HttpStatistics) -> None:
        """`handlers` has one for each of `ROUTES`."""
        self._handlers = handlers
        self._gate = gate
        self._view = view
        self._http = http
        self.idle = asyncio.Event()
        """Set while no request is being answered."""
        self.idle.set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request."""
        record = self._gate.watch.begin(request)
        self._http.num_open += 1
        self.idle.clear()
        route = find_route(request.rel_url.raw_path)
        label, status = route.path if route is not None else "other", _CLIENT_GONE
        try:
            response = await self._guarded(request, route, record)
            if self._view.is_draining and not response.prepared:
                response.force_close()
            status = response.status
            return response
        except asyncio.CancelledError:
            logger.debug("%s: %d, the client has left", label, status)
            raise
        finally:
            self._http.requests[label, status] += 1
            self._gate.watch.end(record, label, status)
            self._http.num_open -= 1
            if not self._http.num_open:
                self.idle.set()

    async def _guarded(
        self, request: web.BaseRequest, route: Route | None, record: RequestRecord
    ) -> web.StreamResponse:
        try:
            preflight = self._gate.origins.preflight(request)
            if preflight is not None:
                return preflight
            self._admit(request, route, record)
            handler = self._handler(request, route)
            response = await handler(request)
        except ApiError as error:
            response = self._failed(error, route)
        except ConnectionError:
            raise  # the client is gone; aiohttp knows
        except Exception:
            fault = internal_error()
            response = self._error_response(fault, route)
            logger.exception("%s %s: %s", request.method, request.path, fault.message)
        return response

    def _admit(self, request: web.BaseRequest, route: Route | None, record: RequestRecord) -> None:
        """Lets a request in or not, before anything of its body is read."""
        assert isinstance(request.protocol, ClientConnection)
        check_head(request, self._gate.limits)
        audience = route.audience if route is not None else Audience.CLIENT
        caller = self._gate.access.admit(request, audience, is_control=request.protocol.is_control)
        if audience not in _UNCOUNTED:
            self._gate.watch.enter(record, caller)

    def _handler(self, request: web.BaseRequest, route: Route | None) -> Handler:
        if route is None:
            raise not_found(request)
        if request.method not in route.allowed_methods:
            message = f"{route.path} is for {' and '.join(route.allowed_methods)}"
            raise ApiError(405, message, code=Code.METHOD_NOT_ALLOWED, allow=", ".join(route.allowed_methods))
        return self._handlers[route.path]

    def _failed(self, error: ApiError, route: Route | None) -> web.Response:
        response = self._error_response(error, route)
        if error.status >= 500 and error.status not in _NO_FAULTS:
            logger.error("answered %d: %s", error.status, error.message)
        if error.status in (401, 408, 413, 431):  # what the client still sends belongs to no request
            response.force_close()
        return response

    def _error_response(self, error: ApiError, route: Route | None) -> web.Response:
        """An error in the form of the route's API; that of a request for answers has the id that the log knows."""
        body = openai_error_body(error) if route is None else route.error_body(error)
        headers = dict(error.headers())
        if route is not None and route.answers is not None:
            headers.update(id_headers(f"{route.answers}{present_record().id_for_failure()}"))
        return web.Response(status=error.status, body=body, content_type="application/json", headers=headers)
