"""Tokenizer process: what it counts, and how a heartbeat and /metrics read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.runtime.histogram import REQUEST_BOUNDS_S, TOKEN_BOUNDS, Histogram, labelled_family
from services.runtime.metrics import PREFIX
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
        requests = CounterMetricFamily(f"{PREFIX}http_requests", "Ended HTTP requests", labels=["route", "status"])
        for (route, status), count in self._http.requests.items():
            requests.add_metric([route, str(status)], count)
        yield requests
        yield from self._gauges()
        yield from self._counters()
        table, http = self._link.table, self._http
        yield table.first_token_s.family(f"{PREFIX}time_to_first_token_seconds", "From a request's head to its token")
        yield table.inter_token_s.family(f"{PREFIX}inter_token_latency_seconds", "Between chunks of an answer")
        yield http.request_s.family(f"{PREFIX}e2e_request_latency_seconds", "From a request's head to its last byte")
        yield http.prompt_tokens.family(f"{PREFIX}request_prompt_tokens", "Tokens of a prompt")

    def _gauges(self) -> Iterable[Metric]:
        gauges = {
            "open_http_requests": (self._http.num_open, "HTTP requests being answered"),
            "open_streams": (self._http.num_open_streams, "Event streams being written"),
            "open_answers": (self._link.table.num_answers, "Answers asked for and not ended"),
            "texts_to_encode": (self._encoder.num_waiting, "Long texts waiting or being encoded"),
            "event_loop_lag_seconds": (self._link.loop_lag_s, "How late a timer was last called"),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"{PREFIX}tokenizer_{name}", text, value=value)
        outbox = GaugeMetricFamily(f"{PREFIX}tokenizer_outbox_frames", "Frames that wait to be sent", labels=["link"])
        for link, port in self._link.ports.items():
            outbox.add_metric([link], port.stats.outbox_frames)
        yield outbox

    def _counters(self) -> Iterable[Metric]:
        counts = self._link.table.counters
        rejected_frames = sum(port.stats.rejected for port in self._link.ports.values())
        yield CounterMetricFamily(f"{PREFIX}prompt_tokens", "Tokens of admitted prompts", value=counts.prompt_tokens)
        yield CounterMetricFamily(f"{PREFIX}generation_tokens", "Tokens received", value=counts.generation_tokens)
        counters = {
            "aborted_answers": (counts.aborted_answers, "Answers given up before their end"),
            "old_rows": (counts.old_rows, "Rows dropped: repeated, late, or of another attempt"),
            "late_rows": (counts.late_rows, "Rows for answers that are closed"),
            "gaps": (counts.gaps, "Rows behind a gap"),
            "refused_messages": (counts.refused_messages + rejected_frames, "Messages and frames dropped"),
            "health_probes": (self._health.num_probes, "Tokens made for health checks"),
        }
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"{PREFIX}tokenizer_{name}", text, value=value)


class RequestCollector(Collector):
    """What is counted about requests as they end, and about their connections."""

    def __init__(self, watch: RequestWatch, connections: ConnectionCounts) -> None:
        self._watch = watch
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        watch, connections = self._watch, self._connections
        yield labelled_family(f"{PREFIX}hop_seconds", "Time of requests in each part of their way", "hop", watch.hop_s)
        yield watch.hop_s[HopName.QUEUE].family(f"{PREFIX}request_queue_seconds", "Time before the first plan")
        yield watch.answer_tokens.family(f"{PREFIX}request_generation_tokens", "Tokens of an answer")
        finished = CounterMetricFamily(f"{PREFIX}finished_answers", "Ended answers", labels=["reason"])
        for reason, count in watch.finished.items():
            finished.add_metric([reason], count)
        yield finished
        yield GaugeMetricFamily(f"{PREFIX}tokenizer_connections", "Open connections", value=connections.num_open)
        yield GaugeMetricFamily(f"{PREFIX}tokenizer_traces", "Ended requests kept", value=watch.ring.num_ended)
        counters = {
            "refused_connections": (connections.num_refused, "Connections over the limits"),
            "over_budget": (watch.num_over_budget, "Requests over the budget of their key"),
            "lost_reports": (watch.ring.num_lost_reports, "Reports about requests that nobody remembers"),
        }
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"{PREFIX}tokenizer_{name}", text, value=value)
