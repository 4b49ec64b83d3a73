"""Detokenizer process: what it counts, and how a heartbeat reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.detokenizer.decoders import Decoders
from services.runtime.metrics import counter, gauge, histogram, labelled_gauge
from services.wire.members import Role
from services.wire.transport import Port


class DetokenizerCollector(Collector):
    """Reads the statistics when asked, so that counting costs the loop nothing more than an addition."""

    def __init__(self, decoders: Decoders, ports: Callable[[], Mapping[Role, Iterable[Port]]]) -> None:
        """`ports` gives the present ones by the role at their other end."""
        self._decoders = decoders
        self._ports = ports

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        statistics, times = self._decoders.statistics, self._decoders.times
        stats = {role: [port.stats for port in ports] for role, ports in self._ports().items()}
        outboxes: dict[tuple[str, ...], float] = {
            (str(role),): sum(each.outbox_frames for each in some) for role, some in stats.items()
        }
        rejected_frames = sum(each.rejected for some in stats.values() for each in some)
        yield gauge("detokenizer_open_answers", self._decoders.num_open)
        yield labelled_gauge("detokenizer_outbox_frames", ["link"], outboxes)
        yield counter("detokenizer_tokens", statistics.num_tokens)
        yield counter("detokenizer_stop_strings", statistics.num_stops_found)
        yield counter("detokenizer_old_rows", statistics.num_old_rows)
        yield counter("detokenizer_resends_asked", statistics.num_resends_asked)
        yield counter("detokenizer_failed_answers", statistics.num_failed)
        yield counter("detokenizer_unread_answers", statistics.num_dropped_with_tokenizer)
        yield counter("detokenizer_refused_messages", statistics.num_refused_messages + rejected_frames)
        yield histogram("detokenizer_batch_rows", times.turn_rows)
        yield histogram("detokenizer_decode_seconds", times.turn_seconds)
