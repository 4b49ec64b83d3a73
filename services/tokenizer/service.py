"""Tokenizer process: its life, from loading the tokenizer to the end of the last stream.

    bind the port -> load -> listen, join the group -> serve ... SIGTERM -> draining (still accepting, for a balancer to
    notice) -> listener closed -> open requests end, or are ended by the drain limit -> Goodbye

Owns the listener, the journal and everything between them. It must never import torch, and never block its event loop
on a long prompt. A fault in the loop that serves the sockets ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import uvloop

from services.model_files.errors import ModelFileError
from services.model_files.generation_config import load_sampling_defaults
from services.model_files.source import ModelFiles, model_name, open_model
from services.model_files.tokenizer import LoadedTokenizer, load_tokenizer
from services.runtime.config import Settings
from services.runtime.service import Process, StartError
from services.tokenizer.access import Access, AccessSettings, read_access_settings, warning_of
from services.tokenizer.api_error import ApiError, Code, unavailable
from services.tokenizer.connection_limits import ConnectionLimits
from services.tokenizer.cross_origin import CrossOrigin
from services.tokenizer.dialect import DialectNames
from services.tokenizer.doors import Doors, open_doors
from services.tokenizer.generation import Generation
from services.tokenizer.handlers import RouteParts, handlers_of
from services.tokenizer.health import Health
from services.tokenizer.http_api import Gate, HttpApi
from services.tokenizer.http_server import HttpServer
from services.tokenizer.instruments import HttpStatistics, RequestCollector, TokenizerCollector
from services.tokenizer.key_budgets import KeyBudgets
from services.tokenizer.logit_rules import RuleMaker
from services.tokenizer.metrics_route import MetricsRoute
from services.tokenizer.otlp_endpoint import check_export
from services.tokenizer.prompts import PromptMaker
from services.tokenizer.request_limits import ServedModel
from services.tokenizer.request_watch import RequestWatch, SpanSink
from services.tokenizer.scheduler_link import SchedulerLink
from services.tokenizer.text_encoder import EncoderSettings, TextEncoder
from services.tokenizer.trace_route import TraceRoute
from services.wire.endpoints import is_ipc
from services.wire.members import State

BALANCER_NOTICE_S = 2.0
_LAST_WORDS_S = 1.0  # with the next, less than the launcher waits for a tokenizer that is in haste
_CUT_S = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Loaded:
    """What lies on disk of the model, as this process needs it."""

    model: ServedModel
    tokenizer: LoadedTokenizer


class TokenizerService:
    """The parts of the process and how they end."""

    def __init__(self, process: Process, loaded: _Loaded, doors: Doors, access: AccessSettings) -> None:
        """Must be made inside a running event loop."""
        settings = process.settings
        self._process = process
        self._doors = doors
        self._stopping = asyncio.Event()
        self._encoder = TextEncoder(loaded.tokenizer, _encoder_settings(settings, loaded.model))
        self._link = SchedulerLink(process)
        self._spans = _span_export(process, loaded.model)
        watch = _request_watch(settings, self._spans)
        self._link.on_report = watch.take
        limits = ConnectionLimits.of(settings)
        gate = Gate(Access(access), CrossOrigin(settings.cors_origins), limits, watch)
        http = HttpStatistics()
        prompts = PromptMaker(loaded.model, self._encoder, self._link.view)
        rules = RuleMaker(loaded.model, prompts)
        generation = Generation(settings, loaded.model, rules, self._link, http)
        health = self._health = Health(self._link)
        parts = RouteParts(
            settings=settings,
            model=loaded.model,
            loaded=loaded.tokenizer,
            prompts=prompts,
            link=self._link,
            generation=generation,
            health=health,
            metrics=MetricsRoute(process, self._link.view, loaded.model.name),
            trace=TraceRoute(watch.ring, process.identity, doors.control_path),
        )
        self._api = HttpApi(handlers_of(parts), gate, self._link.view, http)
        self._server = HttpServer(self._api.handle, limits, gate.origins.headers)
        self._control = HttpServer(self._api.handle, limits, gate.origins.headers, is_control=True)
        process.registry.register(TokenizerCollector(http, self._link, self._encoder, health))
        process.registry.register(RequestCollector(watch, self._server.counts))
        self._notice_s = 0.0 if is_ipc(process.scheduler_endpoint()) else BALANCER_NOTICE_S
        self._loop = asyncio.get_running_loop()
        process.on_stop = self._stop_soon
        if process.is_stopping:
            self._stopping.set()

    async def run(self) -> None:
        """Serves until the process was told to stop and has drained.

        Raises:
            HandshakeError: the scheduler does not let this process join.
        """
        serving = await self._doors.open(self._server, self._control)
        self._link.set_state(State.READY)
        link = asyncio.create_task(self._link.run())
        has_drained = False
        try:
            await _unless_ended(link, self._stopping.wait())
            await self._drain(link, serving)
            has_drained = True
        finally:
            link.cancel()
            await asyncio.gather(link, return_exceptions=True)
            self._health.close()
            self._link.close(has_drained)
            self._encoder.close()
            if self._spans is not None:
                await self._spans.close()

    def _stop_soon(self) -> None:
        """Called in a signal handler."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def _drain(self, link: asyncio.Task[None], serving: list[asyncio.Server]) -> None:
        logger.info("draining")
        self._link.view.is_draining = True
        self._link.set_state(State.DRAINING)
        deadline_s = time.monotonic() + self._process.drain_timeout_s
        notice_s = min(self._notice_s, self._process.drain_timeout_s)
        noticed = asyncio.sleep(notice_s)  # until balancers, which ask /ready so often, know that we leave
        await _unless_ended(link, noticed)
        for server in serving:
            server.close()
        await asyncio.sleep(0)  # what has arrived is handed to its handlers before idle connections are closed
        self._server.close_idle()
        self._control.close_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await _unless_ended(link, self._api.idle.wait())
        if not self._api.idle.is_set():
            why = "drain time is over" if time.monotonic() >= deadline_s else "there is no time to drain"
            logger.warning("%s: %d requests end here", why, len(self._link.table.requests))
        self._link.end_requests(_last_word(self._process))
        with contextlib.suppress(TimeoutError):  # connections take no more bytes once the server shuts down
            async with asyncio.timeout(_LAST_WORDS_S):
                await _unless_ended(link, self._api.idle.wait())
        await asyncio.gather(self._server.shutdown(_CUT_S), self._control.shutdown(_CUT_S))


def _last_word(process: Process) -> ApiError:
    """What clients are told whose requests end unfinished: whether somebody ends the server, or it broke."""
    if process.has_lost_peer:
        return unavailable(Code.BACKEND_LOST, "a process that this request needed has died; try again")
    return unavailable(Code.DRAINING, "the server is shutting down")


async def _unless_ended(link: asyncio.Task[None], awaitable: Coroutine[Any, Any, object]) -> None:
    """Waits for something, but not beyond the end of the link's loop, whose fault is raised."""
    waiting = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({link, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if link.done():
        link.result()


def main(process: Process) -> None:
    """Binds the port, loads the tokenizer, then serves."""
    settings = process.settings
    access = read_access_settings(settings)
    if settings.otlp_endpoint:
        check_export(settings.otlp_endpoint)
    with open_doors(process) as doors:
        warning = warning_of(settings, access)
        if warning:
            logger.warning("%s", warning)
        try:
            loaded = _load(settings)
            gc.collect()
            gc.freeze()  # the vocabulary lives as long as the process: no collection need look at it again
            uvloop.run(_serve(process, loaded, doors, access))
        except ModelFileError as error:
            raise StartError(str(error)) from error


async def _serve(process: Process, loaded: _Loaded, doors: Doors, access: AccessSettings) -> None:
    await TokenizerService(process, loaded, doors, access).run()


def _request_watch(settings: Settings, spans: SpanSink | None) -> RequestWatch:
    budgets = KeyBudgets(settings.max_requests_per_key, settings.max_tokens_per_minute)
    return RequestWatch(settings.trace_ring, budgets, logs_requests=settings.log_requests, spans=spans)


def _span_export(process: Process, model: ServedModel) -> SpanSink | None:
    if not process.settings.otlp_endpoint:
        return None
    from services.tokenizer.span_export import SpanExport  # its packages are an optional extra

    return SpanExport(process.settings.otlp_endpoint, process.identity, model.name)


def _load(settings: Settings) -> _Loaded:
    files = open_model(settings.model)
    tokenizer = load_tokenizer(files)
    model = ServedModel(
        name=settings.served_model_name or model_name(files.path),
        created=int(time.time()),
        context_tokens=settings.max_model_len or _context_of(files),
        num_entries=tokenizer.num_entries,
        end_token_ids=tokenizer.end_token_ids,
        embedding_size=_embedding_size_of(files),
        fingerprint=_fingerprint(settings, files, tokenizer),
        defaults=load_sampling_defaults(files, cast(Literal["auto", "none"], settings.generation_config)),
    )
    return _Loaded(model, tokenizer)


def _fingerprint(settings: Settings, files: ModelFiles, tokenizer: LoadedTokenizer) -> str:
    """What answers depend on beside their request, as far as this process knows it; the same in every process."""
    facts = (files.path.name, files.config, tokenizer.num_entries, settings.dtype, settings.generation_config)
    return f"fp_{hashlib.blake2b(repr(facts).encode(), digest_size=5).hexdigest()}"


def _context_of(files: ModelFiles) -> int:
    """Raises ModelFileError when the model does not say how long its context is."""
    context = files.config.get("max_position_embeddings")
    if type(context) is not int or context < 2:
        raise ModelFileError(files.path, "field max_position_embeddings is missing: set --max-model-len")
    return context


def _embedding_size_of(files: ModelFiles) -> int:
    """Raises ModelFileError when the model does not say how wide its hidden states are."""
    size = files.config.get("hidden_size")
    if type(size) is not int or size < 1:
        raise ModelFileError(files.path, "field hidden_size is missing")
    return size


def _encoder_settings(settings: Settings, model: ServedModel) -> EncoderSettings:
    template = Path(settings.chat_template) if settings.chat_template else None
    names = DialectNames(settings.tool_call_parser, settings.reasoning_parser)
    return EncoderSettings(model.context_tokens, chat_template=template, dialect_names=names)
