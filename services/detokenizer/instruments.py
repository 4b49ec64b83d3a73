"""Detokenizer process: what it counts, and how a heartbeat reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.detokenizer.decoders import Decoders
from services.runtime.metrics import PREFIX
from services.wire.transport import Port


class DetokenizerCollector(Collector):
    """Reads the statistics when asked, so that counting costs the loop nothing more than an addition."""

    def __init__(self, decoders: Decoders, ports: Callable[[], Sequence[Port]]) -> None:
        self._decoders = decoders
        self._ports = ports

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        statistics, port_stats = self._decoders.statistics, [port.stats for port in self._ports()]
        gauges = {
            "open_answers": (self._decoders.num_open, "Answers begun and not ended"),
            "outbox_frames": (sum(stats.outbox_frames for stats in port_stats), "Frames that wait to be sent"),
        }
        rejected_frames = sum(stats.rejected for stats in port_stats)
        counters = {
            "tokens": (statistics.num_tokens, "Tokens turned into text"),
            "old_rows": (statistics.num_old_rows, "Rows dropped: repeated, late, or of another attempt"),
            "resends_asked": (statistics.num_resends_asked, "Gaps asked for again"),
            "stop_strings": (statistics.num_stops_found, "Answers ended by a stop string"),
            "failed_answers": (statistics.num_failed, "Answers that could not be decoded"),
            "unread_answers": (statistics.num_dropped_with_tokenizer, "Answers dropped with their tokenizer process"),
            "refused_messages": (statistics.num_refused_messages + rejected_frames, "Messages and frames dropped"),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"{PREFIX}detokenizer_{name}", text, value=value)
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"{PREFIX}detokenizer_{name}", text, value=value)
