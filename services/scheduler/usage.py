"""scheduler: what a request used of its worker: steps, chunks, pages, time of steps.

Steps and their times are not counted row by row: a core sums them up, and a request remembers where the sums stood when
it got its row. So a token costs nothing here.
"""

from __future__ import annotations

from services.scheduler.core_counters import CoreCounters


class Usage:
    """What one request used so far. Steps count while it holds a row, those included that it had no part in."""

    __slots__ = (
        "_at_row", "_forward_us", "_step_us", "_steps", "num_accepted", "num_chunks", "num_pages", "num_proposed",
        "num_retractions",
    )  # fmt: skip

    def __init__(self) -> None:
        self.num_chunks = 0  # of prompts: steps that computed a part of what was known before
        self.num_pages = 0  # the most that it held when it left a row
        self.num_retractions = 0
        self.num_proposed = self.num_accepted = 0  # ids that speculation proposed, and that the worker sampled too
        self._steps = self._forward_us = self._step_us = 0  # in rows that it has left
        self._at_row: tuple[int, int, int] | None = None  # the core's sums when the first step of its row came back

    def enter_row(self, counters: CoreCounters) -> None:
        """The result of its first step in a row is about to be counted."""
        self._at_row = (counters.steps, counters.forward_us, counters.step_us)

    def leave_row(self, counters: CoreCounters, num_pages: int) -> None:
        """It gives its row back, with this many pages."""
        self.num_pages = max(self.num_pages, num_pages)
        if self._at_row is not None:
            self._steps, self._forward_us, self._step_us = self._until(counters)
            self._at_row = None

    def counters(self, counters: CoreCounters, num_pages: int) -> dict[str, float]:
        """All of it by name, for people.

        Args:
            counters: the core's.
            num_pages: pages that it holds now.
        """
        steps, forward_us, step_us = self._until(counters)
        speculated = {"proposed_tokens": self.num_proposed, "accepted_tokens": self.num_accepted}
        return {
            "steps": steps,
            "chunks": self.num_chunks,
            "pages": max(self.num_pages, num_pages),
            "retractions": self.num_retractions,
            "forward_us": forward_us,
            "step_us": step_us,
            **(speculated if self.num_proposed else {}),
        }

    def _until(self, counters: CoreCounters) -> tuple[int, int, int]:
        if self._at_row is None:
            return self._steps, self._forward_us, self._step_us
        steps, forward_us, step_us = self._at_row
        return (
            self._steps + counters.steps - steps,
            self._forward_us + counters.forward_us - forward_us,
            self._step_us + counters.step_us - step_us,
        )
