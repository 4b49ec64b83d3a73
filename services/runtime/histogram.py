"""A histogram cheap enough for every token.

prometheus-client's own walks its buckets under locks at each observation, some microseconds; this one is a bisection
and two additions, and takes its Prometheus form when it is asked for. One task touches it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily

LATENCY_BOUNDS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
HOP_BOUNDS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
REQUEST_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_BOUNDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Histogram:
    """Counts of observations by upper bound, inclusive, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; what is above the last one is counted under +Inf."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    @property
    def total(self) -> float:
        """The sum of all that was observed."""
        return self._sum

    def observe(self, value: float, times: int = 1) -> None:
        """Counts an observation, or several of the same value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, help_text: str) -> HistogramMetricFamily:
        """The metric family of this histogram, without labels."""
        return HistogramMetricFamily(name, help_text, buckets=self.buckets(), sum_value=self._sum)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that), the last one +Inf."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return buckets


def labelled_family(
    name: str, help_text: str, label: str, histograms: Mapping[str, Histogram]
) -> HistogramMetricFamily:
    """The metric family of several histograms that a label tells apart."""
    family = HistogramMetricFamily(name, help_text, labels=[label])
    for value, histogram in histograms.items():
        family.add_metric([value], buckets=histogram.buckets(), sum_value=histogram.total)
    return family
