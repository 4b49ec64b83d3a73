"""Tokenizer process: a histogram cheap enough for every token.

prometheus-client's own walks its buckets under locks at each observation, some microseconds; this one is a bisection
and two additions, and takes its Prometheus form when it is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """Counts of observations by upper bound, inclusive, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; what is above the last one is counted under +Inf."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, help_text: str) -> HistogramMetricFamily:
        """The metric family of this histogram, without labels."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=self._sum)
