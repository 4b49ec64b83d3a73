"""Tokenizer process: routes, and the boundary at which every failure becomes the API's error body.

A table of paths, not a framework: an unknown path, a wrong method and an exception of ours are answered in the same
form as a wrong field. Whatever goes wrong in one request stays in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import quote

import msgspec
from aiohttp import web

from services.runtime import metrics
from services.runtime.service import Process
from services.tokenizer.api_error import ApiError, Code, internal_error
from services.tokenizer.completions import Completions, model_not_found
from services.tokenizer.health import Health
from services.tokenizer.http_connection import ClientConnection, error_response
from services.tokenizer.instruments import HttpStatistics
from services.tokenizer.request_limits import ServedModel
from services.tokenizer.scheduler_link import SchedulerLink
from services.wire.messages import MemberTelemetry

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLIENT_GONE = 499
_MODEL_ROUTE = "/v1/models/"
_MODEL_BY_ID = f"{_MODEL_ROUTE}{{id}}"

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
}

logger = logging.getLogger(__name__)
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpApi:
    """Answers every request of a listener."""

    def __init__(
        self, process: Process, model: ServedModel, completions: Completions, link: SchedulerLink, http: HttpStatistics
    ) -> None:
        self._process = process
        self._model = model
        self._link = link
        self._http = http
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
            "/metrics": self._metrics,
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request."""
        assert isinstance(request.protocol, ClientConnection)
        request.protocol.begin_request()
        self._http.num_open += 1
        self.idle.clear()
        route, status = "other", _CLIENT_GONE
        try:
            route, handler = self._find(request)
            response = await self._guarded(request, handler)
            if self._link.view.is_draining and not response.prepared:
                response.force_close()
            status = response.status
            return response
        except asyncio.CancelledError:
            logger.debug("%s: %d, the client has left", route, status)
            raise
        finally:
            self._http.requests[route, status] += 1
            self._http.num_open -= 1
            if not self._http.num_open:
                self.idle.set()

    def _find(self, request: web.BaseRequest) -> tuple[str, Handler]:
        """The label of a route for metrics, and what answers."""
        path = request.rel_url.raw_path
        route = _MODEL_BY_ID if path.startswith(_MODEL_ROUTE) and len(path) > len(_MODEL_ROUTE) else path
        if route not in ROUTES:
            asked = quote((path or request.raw_path)[:256], safe="/:%*", errors="replace")
            return "other", _refusing(ApiError(404, f"there is no {asked} here", code=Code.NOT_FOUND))
        allowed = ("GET", "HEAD") if ROUTES[route] == "GET" else (ROUTES[route],)
        if request.method not in allowed:
            message = f"{route} is for {' and '.join(allowed)}"
            return route, _refusing(ApiError(405, message, code=Code.METHOD_NOT_ALLOWED, allow=", ".join(allowed)))
        return route, self._handlers[route]

    async def _guarded(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        try:
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

    def _failed(self, error: ApiError) -> web.Response:
        if error.status >= 500 and error.status != 503:
            logger.error("answered %d: %s", error.status, error.message)
        response = error_response(error)
        if error.status in (408, 413):  # what the client still sends belongs to no request
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
        return _json({"status": "ok" if is_ready else "not ready", "roles": verdicts}, 200 if is_ready else 503)

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """The group by its last heartbeats, this process as it is now."""
        own = self._process.identity
        others = [member for member in self._link.view.members if member.epoch != own.epoch]
        state, progress = self._link.view.session.state, self._link.view.session.progress
        now = metrics.snapshot(self._process.registry)
        collector = metrics.GroupCollector()
        collector.members = (MemberTelemetry(own.role, own.instance, own.epoch, state, 0, progress, now, 0), *others)
        return web.Response(body=metrics.render(collector), headers={"Content-Type": METRICS_CONTENT_TYPE})


def _refusing(error: ApiError) -> Handler:
    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        raise error

    return refuse


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
