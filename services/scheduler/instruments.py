"""scheduler: what it counts, and how a heartbeat reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.runtime.metrics import PREFIX
from services.scheduler.outcomes import CoreCounters
from services.scheduler.router import Router
from services.wire.transport import Port

_COUNTER_TEXTS = {
    "steps": "Steps whose result came",
    "prompt_tokens": "Prompt tokens of admitted requests",
    "cached_tokens": "Prompt tokens that came from the prefix cache",
    "computed_tokens": "Tokens computed by the worker, those computed again after a retraction included",
    "output_tokens": "Tokens produced",
    "admitted": "Requests admitted",
    "retracted": "Times that a running request lost its pages",
    "dropped_rows": "Rows of results for requests that had ended",
    "failed_rows": "Rows that failed alone",
}


class SchedulerCollector(Collector):
    """Reads cores and records when asked, so that counting costs the loop nothing more than an addition."""

    def __init__(self, router: Router, port: Port) -> None:
        self._router = router
        self._port = port
        self._left = CoreCounters()  # of workers that are gone: counters never fall
        self._left_evicted = 0
        self.num_refused = 0
        self.num_unexpected = 0

    def worker_leaves(self, worker: bytes) -> None:
        """Keeps the counts of a worker whose core is about to go."""
        core = self._router.cores[worker]
        self._left_evicted += core.ledger.num_evicted_pages
        for field in fields(CoreCounters):
            setattr(self._left, field.name, getattr(self._left, field.name) + getattr(core.counters, field.name))

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        cores = list(self._router.cores.values())
        gauges = {
            "num_requests_running": (sum(core.num_running for core in cores), "Requests in the batch"),
            "num_requests_waiting": (sum(core.num_waiting for core in cores), "Requests not admitted yet"),
            "num_requests_retracted": (sum(core.num_retracted for core in cores), "Requests that wait to resume"),
            "kv_pages": (sum(core.limits.num_pages for core in cores), "Pages of the KV pool"),
            "kv_pages_free": (sum(core.ledger.pool.num_free for core in cores), "Pages that hold nothing"),
            "kv_pages_cached": (sum(core.ledger.cache.num_evictable_pages for core in cores), "Pages kept for reuse"),
            "plans_in_flight": (sum(core.num_in_flight for core in cores), "Plans whose result has not come"),
            "records": (self._router.num_records, "Requests known, ended ones not acknowledged included"),
            "outbox_frames": (self._port.stats.outbox_frames, "Frames that wait to be sent"),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"{PREFIX}scheduler_{name}", text, value=value)
        for name, text in _COUNTER_TEXTS.items():
            total = getattr(self._left, name) + sum(getattr(core.counters, name) for core in cores)
            yield CounterMetricFamily(f"{PREFIX}scheduler_{name}", text, value=total)
        counters = {
            "evicted_pages": (
                self._left_evicted + sum(core.ledger.num_evicted_pages for core in cores),
                "Cached pages given up for others",
            ),
            "refused_requests": (self.num_refused, "Requests not taken"),
            "stale_messages": (self._router.num_stale, "Messages about unknown requests or other attempts"),
            "dropped_messages": (self.num_unexpected + self._port.stats.rejected, "Messages and frames dropped"),
        }
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"{PREFIX}scheduler_{name}", text, value=value)
