"""Tokenizer process: what it counts, and how a heartbeat and /metrics read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.runtime.histogram import REQUEST_BOUNDS_S, TOKEN_BOUNDS, Histogram
from services.runtime.metrics import (
    LabelledValues,
    counter,
    gauge,
    histogram,
    labelled_counter,
    labelled_gauge,
    labelled_histogram,
)
from services.tokenizer.connection_limits import ConnectionCounts
from services.tokenizer.health import Health
from services.tokenizer.hops import HopName
from services.tokenizer.request_watch import RequestWatch
from services.tokenizer.scheduler_link import SchedulerLink
from services.tokenizer.text_encoder import TextEncoder


class HttpStatistics:
    """What the HTTP side counts."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """Ended requests by route and status; 499 when the client left first."""
        self.num_open = 0
        self.num_open_streams = 0
        self.request_s = Histogram(REQUEST_BOUNDS_S)
        """From the head of a request for tokens to the last byte of its answer."""
        self.prompt_tokens = Histogram(TOKEN_BOUNDS)


class TokenizerCollector(Collector):
    """Reads the numbers when asked, so that counting costs the loop nothing more than an addition."""

    def __init__(self, http: HttpStatistics, link: SchedulerLink, encoder: TextEncoder, health: Health) -> None:
        self._http = http
        self._link = link
        self._encoder = encoder
        self._health = health

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        http, table = self._http, self._link.table
        requests: LabelledValues = {
            (route, str(status)): float(count) for (route, status), count in http.requests.items()
        }
        yield labelled_counter("http_requests", ["route", "status"], requests)
        yield counter("prompt_tokens", table.counters.prompt_tokens)
        yield counter("generation_tokens", table.counters.generation_tokens)
        yield histogram("time_to_first_token_seconds", table.first_token_s)
        yield histogram("inter_token_latency_seconds", table.inter_token_s)
        yield histogram("e2e_request_latency_seconds", http.request_s)
        yield histogram("request_prompt_tokens", http.prompt_tokens)
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterable[Metric]:
        yield gauge("tokenizer_open_http_requests", self._http.num_open)
        yield gauge("tokenizer_open_streams", self._http.num_open_streams)
        yield gauge("tokenizer_open_answers", self._link.table.num_answers)
        yield gauge("tokenizer_texts_to_encode", self._encoder.num_waiting)
        yield gauge("tokenizer_event_loop_lag_seconds", self._link.loop_lag_s)
        outboxes: dict[tuple[str, ...], float] = {
            (link,): float(port.stats.outbox_frames) for link, port in self._link.ports.items()
        }
        yield labelled_gauge("tokenizer_outbox_frames", ["link"], outboxes)

    def _counters(self) -> Iterable[Metric]:
        counts = self._link.table.counters
        rejected_frames = sum(port.stats.rejected for port in self._link.ports.values())
        yield counter("tokenizer_aborted_answers", counts.aborted_answers)
        yield counter("tokenizer_old_rows", counts.old_rows)
        yield counter("tokenizer_late_rows", counts.late_rows)
        yield counter("tokenizer_gaps", counts.gaps)
        yield counter("tokenizer_refused_messages", counts.refused_messages + rejected_frames)
        yield counter("tokenizer_health_probes", self._health.num_probes)


class RequestCollector(Collector):
    """What is counted about requests as they end, and about their connections."""

    def __init__(self, watch: RequestWatch, connections: ConnectionCounts) -> None:
        self._watch = watch
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        watch, connections = self._watch, self._connections
        yield labelled_counter("finished_answers", ["reason"], {(name,): n for name, n in watch.finished.items()})
        yield labelled_histogram("hop_seconds", "hop", watch.hop_s)
        yield histogram("request_queue_seconds", watch.hop_s[HopName.QUEUE])
        yield histogram("request_inference_seconds", watch.inference_s)
        yield histogram("request_time_per_output_token_seconds", watch.output_token_s)
        yield histogram("request_generation_tokens", watch.answer_tokens)
        yield histogram("request_max_generation_tokens", watch.longest_answer_tokens)
        yield gauge("tokenizer_connections", connections.num_open)
        yield gauge("tokenizer_traces", watch.ring.num_ended)
        yield counter("tokenizer_refused_connections", connections.num_refused)
        yield counter("tokenizer_over_budget", watch.num_over_budget)
        yield counter("tokenizer_lost_reports", watch.ring.num_lost_reports)
