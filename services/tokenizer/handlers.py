"""Tokenizer process: what answers each route of `routes`, made of the parts of a running process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from services.model_files.tokenizer import LoadedTokenizer
from services.runtime.config import Settings
from services.tokenizer.answer_plan import AnswerPlanner
from services.tokenizer.chat_requests import ChatRequests
from services.tokenizer.completions import Completions
from services.tokenizer.control_routes import ControlRoutes
from services.tokenizer.embeddings import Embeddings
from services.tokenizer.generation import Generation
from services.tokenizer.health import Health
from services.tokenizer.messages import Messages
from services.tokenizer.metrics_route import MetricsRoute
from services.tokenizer.native_generate import NativeGenerate, NativeModel
from services.tokenizer.openapi import OpenApiRoute
from services.tokenizer.prompts import PromptMaker
from services.tokenizer.request_limits import ServedModel
from services.tokenizer.responses import Responses
from services.tokenizer.scheduler_link import SchedulerLink
from services.tokenizer.scores import Scores
from services.tokenizer.status_routes import StatusRoutes
from services.tokenizer.structured_output import StructureLimits
from services.tokenizer.tokenization import Tokenization
from services.tokenizer.trace_route import TraceRoute

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class RouteParts:
    """What the handlers of one process are made of."""

    settings: Settings
    model: ServedModel
    loaded: LoadedTokenizer
    prompts: PromptMaker
    link: SchedulerLink
    generation: Generation
    health: Health
    metrics: MetricsRoute
    trace: TraceRoute


def handlers_of(parts: RouteParts) -> Mapping[str, Handler]:
    """What answers each path of `ROUTES`."""
    settings, model, prompts, generation = parts.settings, parts.model, parts.prompts, parts.generation
    planner = AnswerPlanner(parts.loaded, prompts.dialect, StructureLimits.of(settings))
    chats = ChatRequests(settings, prompts, planner, generation)
    completions = Completions(settings, model, prompts, chats, generation)
    messages = Messages(settings, model, chats, generation)
    tokenization = Tokenization(settings, (model, parts.loaded), prompts, chats, generation)
    status = StatusRoutes(settings, model, parts.link, generation, parts.health)
    control = ControlRoutes(settings, parts.link.control, generation.names)
    native = NativeGenerate(settings, NativeModel(model, parts.loaded), prompts, generation)
    return {
        "/v1/chat/completions": completions.chat,
        "/v1/completions": completions.completion,
        "/v1/responses": Responses(settings, model, chats, generation).create,
        "/v1/messages": messages.create,
        "/v1/messages/count_tokens": messages.count_tokens,
        "/generate": native.create,
        "/tokenize": tokenization.tokenize,
        "/detokenize": tokenization.detokenize,
        "/v1/chat/completions/render": tokenization.render,
        "/v1/embeddings": Embeddings(settings, model, prompts, generation).create,
        "/v1/score": Scores(settings, model, prompts, generation).create,
        "/v1/models": status.models,
        "/v1/models/{id}": status.model_by_id,
        "/live": status.live,
        "/ready": status.ready,
        "/health": status.health,
        "/metrics": parts.metrics.answer,
        "/trace/{id}": parts.trace.answer,
        "/openapi.json": OpenApiRoute(settings, model).answer,
        "/server_info": status.server_info,
        "/flush_cache": control.flush_cache,
        "/abort_request": control.abort_request,
        "/pause": control.pause,
        "/resume": control.resume,
    }
