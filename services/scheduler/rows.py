"""scheduler: the rows of a worker. Each is free or used; what was given back is told with the next plan."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from services.scheduler.queues import QueueError


class Rows:
    """Rows [0, max_rows) of one worker."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._free = list(range(max_rows))  # a heap: low rows are used again first
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        """Rows that `take` can hand out."""
        return len(self._free)

    @property
    def has_released(self) -> bool:
        """Whether the worker does not know yet of some that were given back."""
        return bool(self._released)

    def take(self) -> int:
        """The lowest free row; IndexError when none is."""
        return heapq.heappop(self._free)

    def give_back(self, row: int) -> None:
        """A request leaves its row."""
        heapq.heappush(self._free, row)
        self._released.append(row)

    def take_released(self) -> list[int]:
        """What was given back since the last call."""
        released, self._released = self._released, []
        return released

    def check(self, used: Iterable[int]) -> None:
        """QueueError unless used and free rows are exactly the worker's."""
        rows = sorted([*used, *self._free])
        if rows != list(range(self._max_rows)):
            raise QueueError(f"rows {rows} instead of {self._max_rows} different ones")
