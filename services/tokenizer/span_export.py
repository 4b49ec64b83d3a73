"""Tokenizer process: ended requests as OpenTelemetry spans, one for each hop, sent to a collector over OTLP/HTTP.

    http (kind server, child of the caller's traceparent)
      |- tokenize
      |- queue, prefill, decode, detokenize      of each answer

Made from records only, so that no other process needs the library. A request is exported a moment after its end, when
the last reports of the others have come; sending is a thread's work and what it cannot keep up with is dropped. It must
never hold up serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

from services.tokenizer.hops import Hop, HopName, hops_of
from services.tokenizer.request_record import RequestRecord
from services.wire.endpoints import Identity

LAST_REPORTS_S = 1.0  # after the end of an answer, for what other processes still have to tell
_BATCH_MS = 1000
_FLUSH_S = 1.0
_PATH = "/v1/traces"
_SENDING_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class SpanExport:
    """Sends spans; made inside a running event loop."""

    def __init__(self, endpoint: str, own: Identity, model: str) -> None:
        """`endpoint` is checked by `otlp_endpoint`; `model` is the served name, an attribute of every request."""
        who = {"service.name": "tokenway", "service.instance.id": f"{own.role}/{own.instance}"}
        self._provider = TracerProvider(resource=Resource(who), shutdown_on_exit=False)
        sender = OTLPSpanExporter(endpoint=_traces_url(endpoint), timeout=_SENDING_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(sender, schedule_delay_millis=_BATCH_MS))
        self._tracer = self._provider.get_tracer("tokenway")
        self._own = own
        self._model = model
        self._waiting: dict[RequestRecord, asyncio.TimerHandle] = {}

    def add(self, record: RequestRecord) -> None:
        """A request has ended; its spans follow when the last reports about it have come."""
        loop = asyncio.get_running_loop()
        self._waiting[record] = loop.call_later(LAST_REPORTS_S, self._export, record)

    async def close(self) -> None:
        """Exports what waits, for a second at most."""
        for record, timer in list(self._waiting.items()):
            timer.cancel()
            self._export(record)
        loop, is_flushed = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._provider.force_flush()
            with contextlib.suppress(RuntimeError):  # the loop may be gone: the collector took too long
                loop.call_soon_threadsafe(is_flushed.set)

        threading.Thread(target=flush, name="last-spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await is_flushed.wait()

    def _export(self, record: RequestRecord) -> None:
        del self._waiting[record]
        http, *others = hops_of(record, self._own)
        root = self._tracer.start_span(
            f"{http.name} {record.route}",
            context=_parent_context(record),
            kind=SpanKind.SERVER,
            start_time=_ns(http.start_unix_us),
            attributes=self._attributes(record),
        )
        inside = set_span_in_context(root)
        for hop in others:
            span = self._tracer.start_span(
                str(hop.name), context=inside, start_time=_ns(hop.start_unix_us), attributes=_hop_attributes(hop)
            )
            span.end(_ns(hop.start_unix_us + hop.wait_us + hop.work_us))
        root.end(_ns(http.start_unix_us + http.work_us))

    def _attributes(self, record: RequestRecord) -> dict[str, str | int | float]:
        attributes: dict[str, str | int | float] = {
            "http.route": record.route,
            "http.response.status_code": record.status,
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "tokenway.cached_tokens": record.cached_tokens,
            "tokenway.request_id": record.request_id,
        }
        if record.first_token_s is not None:
            attributes["tokenway.time_to_first_token_s"] = record.first_token_s
        return attributes


def _traces_url(endpoint: str) -> str:
    """A collector's address alone is one to which the usual path belongs."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH


def _hop_attributes(hop: Hop) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {
        "tokenway.role": str(hop.role),
        "tokenway.instance": hop.instance,
        "tokenway.wait_ms": hop.wait_us / 1000,
        "tokenway.work_ms": hop.work_us / 1000,
    }
    if hop.name is not HopName.TOKENIZE:
        attributes["tokenway.answer_id"] = hop.request_id.hex()
    return attributes | {f"tokenway.{name}": value for name, value in hop.counters.items()}


def _parent_context(record: RequestRecord) -> Context:
    parent = record.parent
    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    span = NonRecordingSpan(SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags))
    return set_span_in_context(span, Context())


def _ns(unix_us: int) -> int:
    return 1000 * unix_us
