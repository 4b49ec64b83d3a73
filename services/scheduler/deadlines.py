"""scheduler: when requests run out of time. Pure: the shell brings the clock."""

from __future__ import annotations

import heapq


class Deadlines:
    """Due times of requests. A request that ended earlier simply comes out late and is then unknown."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bytes, int]] = []

    def add(self, due_s: float, request_id: bytes, attempt: int) -> None:
        """Sets the time at which a request must have ended."""
        heapq.heappush(self._heap, (due_s, request_id, attempt))

    def pop_due(self, now_s: float) -> list[tuple[bytes, int]]:
        """The (request id, attempt) pairs whose time is over; each comes out once."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            _, request_id, attempt = heapq.heappop(self._heap)
            due.append((request_id, attempt))
        return due

    def next_s(self) -> float:
        """The next due time; infinity when there is none."""
        return self._heap[0][0] if self._heap else float("inf")
