"""Detokenizer process: where the time of its turns goes, without a look at the clock for each answer.

A turn decodes a batch of rows. Each row's share of a turn is the turn's time by its rows; an answer remembers where the
sums stood when it began, so that at its end two subtractions tell how long it was worked on and how long it waited for
others. An answer that had no row in a turn is counted as if it had: for people, near enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.runtime.histogram import HOP_BOUNDS_S, Histogram

BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """What is reported of an answer. Sums are those at its beginning."""

    tokenizer: bytes
    request_id: bytes
    attempt: int
    started_unix_s: float
    sums_at_start: tuple[float, float]
    num_chunks: int
    num_tokens: int


@dataclass(slots=True)
class TurnTimes:
    """Sums over all turns with rows so far, in seconds."""

    work_s: float = 0.0
    wait_s: float = 0.0
    turn_rows: Histogram = field(default_factory=lambda: Histogram(BATCH_BOUNDS))
    turn_seconds: Histogram = field(default_factory=lambda: Histogram(HOP_BOUNDS_S))

    @property
    def sums(self) -> tuple[float, float]:
        """Work and wait of an answer that would have been there all the time."""
        return self.work_s, self.wait_s

    def add(self, turn_s: float, num_rows: int) -> None:
        """One turn decoded so many rows (>= 1) in this time."""
        share_s = turn_s / num_rows
        self.work_s += share_s
        self.wait_s += turn_s - share_s
        self.turn_rows.observe(num_rows)
        self.turn_seconds.observe(turn_s)

    def since(self, sums: tuple[float, float]) -> tuple[float, float]:
        """Work and wait since the sums stood there."""
        return self.work_s - sums[0], self.wait_s - sums[1]
