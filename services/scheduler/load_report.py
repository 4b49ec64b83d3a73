"""scheduler: how loaded it is, when tokenizers are told, and after how long a refused client should come back.

Pure: the shell brings the clock.
"""

from __future__ import annotations

import math

from services.scheduler.core import Core
from services.wire.members import State
from services.wire.requests import Load

CHANGED_INTERVAL_S = 0.1
IDLE_INTERVAL_S = 1.0
RETRY_STARTING_S = 2
RETRY_DRAINING_S = 5
_MAX_RETRY_S = 60
_UNKNOWN_RETRY_S = 10
_LEAST_RATE = 0.001
_RATE_WINDOW_S = 10.0


class FinishRate:
    """How many requests end in a second, averaged over about the last ten."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._measured_s = 0.0

    def count(self, now_s: float) -> None:
        """One request ended."""
        self._rate = self.at(now_s) + 1 / _RATE_WINDOW_S
        self._measured_s = now_s

    def at(self, now_s: float) -> float:
        """Requests per second."""
        return self._rate * math.exp(-max(now_s - self._measured_s, 0.0) / _RATE_WINDOW_S)

    def retry_after_s(self, num_waiting: int, now_s: float) -> int:
        """Whole seconds until those who wait now will have been served, 1 to 60; 10 when nothing has ended lately."""
        rate = self.at(now_s)
        if rate < _LEAST_RATE:
            return _UNKNOWN_RETRY_S
        return max(1, min(_MAX_RETRY_S, math.ceil(num_waiting / rate)))


def load_of(cores: list[Core], state: State, retry_after_s: int, idle_ms: int) -> Load:
    """What tokenizers are told; all zero while no worker is there. A request must fit whichever worker gets it."""
    return Load(
        state=state,
        num_waiting=sum(core.num_waiting for core in cores),
        max_waiting=sum(core.limits.max_waiting + core.num_free_rows for core in cores),
        num_running=sum(core.num_running + core.num_retracted for core in cores),
        free_pages=sum(core.ledger.num_available for core in cores),
        num_pages=sum(core.limits.num_pages for core in cores),
        max_total_tokens=min((core.limits.max_total_tokens for core in cores), default=0),
        retry_after_s=retry_after_s,
        idle_ms=min(idle_ms, 2**31 - 1),
        max_open=min(sum(core.limits.max_open for core in cores), 2**31 - 1),
    )


class LoadPacer:
    """Says when a `Load` is due: ten times a second while it changes, once a second otherwise.

    While turns come by themselves, none is made for this: who sees no change at first looks again within two intervals.
    """

    def __init__(self) -> None:
        self._sent_s = -math.inf
        self._sent: Load | None = None
        self._looked_s = -math.inf  # when the load was last summed up
        self._wake_s = -math.inf

    def may_be_due(self, now_s: float) -> bool:
        """Whether `is_due` could say yes now, so that the load is worth summing up; if not, it may change unseen."""
        if now_s - self._looked_s >= CHANGED_INTERVAL_S:
            return True
        soon_s, late_s = self._looked_s + CHANGED_INTERVAL_S, self._looked_s + 2 * CHANGED_INTERVAL_S
        self._wake_s = min(max(self._wake_s, soon_s), late_s)
        return False

    def is_due(self, load: Load, now_s: float) -> bool:
        """Whether to send `load` now. Time and pages alone are no change: while anything runs, they never stay."""
        self._looked_s = now_s
        changed = self._sent is None or _lasting(load) != _lasting(self._sent)
        due_s = self._sent_s + (CHANGED_INTERVAL_S if changed else IDLE_INTERVAL_S)
        if now_s < due_s:
            self._wake_s = due_s
            return False
        self._sent, self._sent_s, self._wake_s = load, now_s, now_s + IDLE_INTERVAL_S
        return True

    def next_s(self) -> float:
        """When to look again. What does not change is no reason: a time that has passed would make the loop spin."""
        return self._wake_s


def _lasting(load: Load) -> tuple[object, ...]:
    return load.state, load.num_waiting, load.max_waiting, load.num_running, load.num_pages
