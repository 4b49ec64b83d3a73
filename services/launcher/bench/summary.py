"""Many times as three numbers, and rows of them as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Mean, median and 99th percentile of a set of times in milliseconds; all zero when it is empty."""

    mean_ms: float
    median_ms: float
    p99_ms: float

    @property
    def is_empty(self) -> bool:
        """Whether there was no time at all: no event takes none."""
        return not (self.mean_ms or self.median_ms or self.p99_ms)

    def __str__(self) -> str:
        return f"{self.mean_ms:.1f} / {self.median_ms:.1f} / {self.p99_ms:.1f}"


def summarize(seconds: Sequence[float]) -> Summary:
    """The summary of times given in seconds; the percentile is the nearest rank."""
    if not seconds:
        return Summary(0.0, 0.0, 0.0)
    ordered = sorted(seconds)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return Summary(*(round(1000 * value, 3) for value in (statistics.fmean(ordered), statistics.median(ordered), p99)))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that is readable as it is and as Markdown; the first column is left-aligned, the others right."""
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])
