"""Tokenizer process: routes, and the boundary at which every failure becomes the API's error body.

A table of paths, not a framework: an unknown path, a wrong method and an exception of ours are answered in the same
form as a wrong field. Whatever goes wrong in one request stays in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
from aiohttp import web

from services.tokenizer.access import Access, Audience, caller_of, not_found
from services.tokenizer.api_error import ApiError, Code, internal_error
from services.tokenizer.completions import Completions
from services.tokenizer.connection_limits import ConnectionLimits, check_head
from services.tokenizer.cross_origin import CrossOrigin
from services.tokenizer.generation import model_not_found
from services.tokenizer.health import Health
from services.tokenizer.http_connection import ClientConnection, error_response
from services.tokenizer.instruments import HttpStatistics
from services.tokenizer.metrics_route import MetricsRoute
from services.tokenizer.request_limits import ServedModel
from services.tokenizer.request_record import RequestRecord
from services.tokenizer.request_watch import RequestWatch
from services.tokenizer.scheduler_link import SchedulerLink
from services.tokenizer.trace_route import TRACE_ROUTE, TraceRoute

_CLIENT_GONE = 499
_MODEL_ROUTE = "/v1/models/"
_MODEL_BY_ID = f"{_MODEL_ROUTE}{{id}}"
TRACE_BY_ID = f"{TRACE_ROUTE}{{id}}"
_WITH_ID = ((_MODEL_ROUTE, _MODEL_BY_ID), (TRACE_ROUTE, TRACE_BY_ID))

# path -> method; HEAD goes wherever GET does
ROUTES: Mapping[str, str] = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/models": "GET",
    _MODEL_BY_ID: "GET",
    "/live": "GET",
    "/ready": "GET",
    "/health": "GET",
    "/metrics": "GET",
    TRACE_BY_ID: "GET",
}
# route -> whom it is for; a client with a key where nothing is said, also for paths that lead nowhere
AUDIENCES: Mapping[str, Audience] = {
    "/live": Audience.ANYONE,
    "/ready": Audience.ANYONE,
    "/health": Audience.ANYONE,
    "/metrics": Audience.METRICS,
}
_UNCOUNTED = frozenset({Audience.ANYONE, Audience.METRICS})  # no work that a key's budget would pay

logger = logging.getLogger(__name__)
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Gate:
    """What stands before every route, and what is written down behind it."""

    access: Access
    origins: CrossOrigin
    limits: ConnectionLimits
    watch: RequestWatch


@dataclass(frozen=True)
class Observation:
    """Routes for those who watch the server."""

    metrics: MetricsRoute
    trace: TraceRoute


class HttpApi:
    """Answers every request of both listeners."""

    def __init__(
        self,
        model: ServedModel,
        completions: Completions,
        link: SchedulerLink,
        http: HttpStatistics,
        gate: Gate,
        observation: Observation,
    ) -> None:
        self._model = model
        self._link = link
        self._http = http
        self._gate = gate
        self.health = Health(link)
        self.idle = asyncio.Event()
        """Set while no request is being answered."""
        self.idle.set()
        self._handlers: Mapping[str, Handler] = {
            "/v1/chat/completions": completions.chat,
            "/v1/completions": completions.completion,
            "/v1/models": self._models,
            _MODEL_BY_ID: self._model_by_id,
            "/live": self._live,
            "/ready": self._ready,
            "/health": self._health,
            "/metrics": observation.metrics.answer,
            TRACE_BY_ID: observation.trace.answer,
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request."""
        assert isinstance(request.protocol, ClientConnection)
        request.protocol.begin_request()
        record = self._gate.watch.begin(request)
        self._http.num_open += 1
        self.idle.clear()
        route, status = "other", _CLIENT_GONE
        try:
            route = _route_of(request)
            response = await self._guarded(request, route, record)
            if self._link.view.is_draining and not response.prepared:
                response.force_close()
            status = response.status
            return response
        except asyncio.CancelledError:
            logger.debug("%s: %d, the client has left", route, status)
            raise
        finally:
            self._http.requests[route, status] += 1
            self._gate.watch.end(record, route, status)
            self._http.num_open -= 1
            if not self._http.num_open:
                self.idle.set()

    async def _guarded(self, request: web.BaseRequest, route: str, record: RequestRecord) -> web.StreamResponse:
        try:
            preflight = self._gate.origins.preflight(request)
            if preflight is not None:
                return preflight
            self._admit(request, route, record)
            handler = self._handler(request, route)
            response = await handler(request)
        except ApiError as error:
            response = self._failed(error)
        except ConnectionError:
            raise  # the client is gone; aiohttp knows
        except Exception:
            fault = internal_error()
            logger.exception("%s %s: %s", request.method, request.path, fault.message)
            response = error_response(fault)
        return response

    def _admit(self, request: web.BaseRequest, route: str, record: RequestRecord) -> None:
        """Lets a request in or not, before anything of its body is read."""
        assert isinstance(request.protocol, ClientConnection)
        check_head(request, self._gate.limits)
        audience = AUDIENCES.get(route, Audience.CLIENT)
        caller = self._gate.access.admit(request, audience, is_control=request.protocol.is_control)
        if audience not in _UNCOUNTED:
            self._gate.watch.enter(record, caller)

    def _handler(self, request: web.BaseRequest, route: str) -> Handler:
        if route not in ROUTES:
            raise not_found(request)
        allowed = ("GET", "HEAD") if ROUTES[route] == "GET" else (ROUTES[route],)
        if request.method not in allowed:
            message = f"{route} is for {' and '.join(allowed)}"
            raise ApiError(405, message, code=Code.METHOD_NOT_ALLOWED, allow=", ".join(allowed))
        return self._handlers[route]

    def _failed(self, error: ApiError) -> web.Response:
        if error.status >= 500 and error.status != 503:
            logger.error("answered %d: %s", error.status, error.message)
        response = error_response(error)
        if error.status in (401, 408, 413, 431):  # what the client still sends belongs to no request
            response.force_close()
        return response

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._model_card()]})

    async def _model_by_id(self, request: web.BaseRequest) -> web.StreamResponse:
        name = request.path.removeprefix(_MODEL_ROUTE)
        if name != self._model.name:
            raise model_not_found(name)
        return _json(self._model_card())

    def _model_card(self) -> dict[str, object]:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "tokenway",
            "max_model_len": min(self._link.view.max_total_tokens or model.context_tokens, model.context_tokens),
        }

    async def _live(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json({"status": "ok"})

    async def _ready(self, request: web.BaseRequest) -> web.StreamResponse:
        is_ready, _ = await self.health.check()
        return _json({"status": "ok" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        is_ready, verdicts = await self.health.check()
        verdict: dict[str, object] = {"status": "ok" if is_ready else "not ready"}
        if caller_of(request).is_known:
            verdict["roles"] = verdicts
        return _json(verdict, 200 if is_ready else 503)


def _route_of(request: web.BaseRequest) -> str:
    """The label of a route for metrics; "other" for a path that leads nowhere."""
    path = request.rel_url.raw_path
    for start, route in _WITH_ID:
        if path.startswith(start) and len(path) > len(start):
            return route
    return path if path in ROUTES else "other"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
