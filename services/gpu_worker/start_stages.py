"""gpu_worker: where the time of a start goes, stage by stage; each moment belongs to one of them.

    libraries    the process and what it imports, other ranks to come, and whatever is in no other stage
    weights      reading, decoding and placing them, and laying them out (`weights.LoadReport` has the parts)
    compile      loops compiled by numba, or found as they were compiled before, wherever they were first asked for
    forms        measuring which forms of products and attention are fastest here
    limits       measuring what the machine can do
    warm_up      first steps, and the memory that the largest takes
    recording    the KV pool, and the decode steps that are recorded over it

A stage within another, as `compile` is in several, takes its time from that one: together they are the whole start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from time import perf_counter
from types import TracebackType

from services.gpu_worker.cpu_loops import loops_problem

logger = logging.getLogger(__name__)


class StartStage(StrEnum):
    """See the module."""

    LIBRARIES = "libraries"
    WEIGHTS = "weights"
    COMPILE = "compile"
    FORMS = "forms"
    LIMITS = "limits"
    WARM_UP = "warm_up"
    RECORDING = "recording"


class StartStages:
    """The clock of one start; entered while it lasts. Of one thread."""

    def __init__(self, before_s: float = 0.0, clock: Callable[[], float] = perf_counter) -> None:
        """Takes what has been spent on libraries so far, and seconds from any beginning."""
        self._clock = clock
        self._seconds = {StartStage.LIBRARIES: before_s}
        self._open = [StartStage.LIBRARIES]
        self._turned_s = clock()
        self._watching = ExitStack()

    def __enter__(self) -> StartStages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.close()

    @property
    def seconds(self) -> Mapping[StartStage, float]:
        """So far, of each stage that there was."""
        return self._seconds

    def begin(self, stage: StartStage) -> None:
        """From here on the time is this stage's."""
        self._turn()
        self._open.append(stage)

    def end(self) -> None:
        """From here on it is that of the stage around the one that began last."""
        self._turn()
        self._open.pop()

    @contextmanager
    def within(self, stage: StartStage) -> Iterator[None]:
        """A stage for as long as the context."""
        self.begin(stage)
        try:
            yield
        finally:
            self.end()

    def watch_compilation(self) -> None:
        """On a CPU: until the start is over, whatever numba compiles is a stage of its own; it is imported here."""
        with self.within(StartStage.COMPILE):
            if loops_problem():
                return
            from services.gpu_worker.compile_events import compilation_told  # only where there is numba
        self._watching.enter_context(compilation_told(lambda: self.begin(StartStage.COMPILE), self.end))

    def log(self) -> None:
        """One line, once the worker is ready."""
        self._turn()
        parts = ", ".join(f"{stage.replace('_', '-')} {seconds:.1f} s" for stage, seconds in self._seconds.items())
        logger.info("start: %.1f s (%s)", sum(self._seconds.values()), parts)

    def _turn(self) -> None:
        now_s = self._clock()
        stage = self._open[-1]
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now_s - self._turned_s
        self._turned_s = now_s
