"""Numbers out of /metrics: what histograms counted between two looks, summed over processes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_BOUND = re.compile(r'le="([^"]*)"')


@dataclass(frozen=True)
class Histogram:
    """Counts by upper bound (cumulative, the last one +Inf), and the sum of the values."""

    buckets: tuple[tuple[float, float], ...]
    total: float

    @property
    def count(self) -> float:
        """How many values."""
        return self.buckets[-1][1] if self.buckets else 0.0

    @property
    def mean(self) -> float:
        """Of the values; NaN without any."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """By interpolation within the bucket; NaN without values, the highest bound for what lies above all."""
        wanted, low, below = share * self.count, 0.0, 0.0
        for bound, count in self.buckets if self.count else ():
            if count >= wanted and count > below:
                return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
            low, below = bound, count
        return math.nan


def read_samples(text: str) -> Mapping[str, float]:
    """Every sample of a Prometheus text by its name and labels as they stand there."""
    return {f"{name}{{{labels}}}": float(value) for name, labels, value in _SAMPLE.findall(text)}


def histogram_between(before: Mapping[str, float], after: Mapping[str, float], name: str) -> Histogram:
    """What a histogram of all processes counted between two looks."""
    counts: dict[float, float] = {}
    total = 0.0
    for key, value in after.items():
        grown = value - before.get(key, 0.0)
        if key.startswith(f"{name}_bucket{{") and (bound := _BOUND.search(key)):
            limit = float(bound[1])
            counts[limit] = counts.get(limit, 0.0) + grown
        elif key.startswith(f"{name}_sum{{"):
            total += grown
    return Histogram(tuple(sorted(counts.items())), total)
