"""Tokenizer process: what it counts, and how a heartbeat and /metrics read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.runtime.histogram import Histogram
from services.runtime.metrics import PREFIX
from services.tokenizer.health import Health
from services.tokenizer.scheduler_link import SchedulerLink
from services.tokenizer.text_encoder import TextEncoder

_LATENCY_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKEN_BOUNDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class HttpStatistics:
    """What the HTTP side counts."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """Ended requests by route and status; 499 when the client left first."""
        self.num_open = 0
        self.num_open_streams = 0
        self.request_s = Histogram(_LATENCY_BOUNDS_S)
        """From the head of a request for tokens to the last byte of its answer."""
        self.prompt_tokens = Histogram(_TOKEN_BOUNDS)


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
