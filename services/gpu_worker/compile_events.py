"""gpu_worker: when numba compiles. To be imported only where `cpu_loops.loops_problem` finds none: it imports numba."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from numba.core.event import Listener, install_listener

# Held while a loop is compiled or taken from the folder of compiled ones, and within itself for the parts of it. The
# event "numba:compile" would tell of the parts alone: what torch's threads call is compiled as a C callback.
_LOCK = "numba:compiler_lock"


class _OutermostListener(Listener):  # type: ignore[misc]
    """Tells of the outermost of nested events."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end
        self._depth = 0

    def on_start(self, event: object) -> None:
        if self._depth == 0:
            self._begin()
        self._depth += 1

    def on_end(self, event: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._end()


def compilation_told(begin: Callable[[], None], end: Callable[[], None]) -> AbstractContextManager[Any]:
    """While entered, calls `begin` where numba starts to compile and `end` where it is done, in the same thread."""
    told: AbstractContextManager[Any] = install_listener(_LOCK, _OutermostListener(begin, end))
    return told
