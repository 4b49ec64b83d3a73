"""Tokenizer process: GET /metrics: the group by its last heartbeats, this process as it is now."""

from __future__ import annotations

from aiohttp import web

from services.runtime import metrics
from services.runtime.service import Process
from services.tokenizer.backend_view import BackendView
from services.tokenizer.vllm_metrics import VllmCollector
from services.wire.members import MemberTelemetry
from services.wire.samples import pack_samples

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsRoute:
    """Renders Prometheus text."""

    def __init__(self, process: Process, view: BackendView, model: str) -> None:
        """`model` is the served name, a label of vLLM's metrics."""
        self._process = process
        self._view = view
        self._model = model

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """All families; with `--metric-names vllm` those of vLLM too."""
        group = metrics.GroupCollector()
        group.members = self._members()
        has_vllm_names = self._process.settings.metric_names == "vllm"
        also = [VllmCollector(group, self._model)] if has_vllm_names else []
        body = metrics.render(group, *also)
        return web.Response(body=body, headers={"Content-Type": METRICS_CONTENT_TYPE})

    def _members(self) -> tuple[MemberTelemetry, ...]:
        own, session = self._process.identity, self._view.session
        others = [member for member in self._view.members if member.epoch != own.epoch]
        now = pack_samples(metrics.snapshot(self._process.registry))
        return (
            MemberTelemetry(own.role, own.instance, own.epoch, session.state, 0, session.progress, now, 0),
            *others,
        )
