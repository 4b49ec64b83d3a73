"""gpu_worker: what a measurement tells its parent: JSON, a line each."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from services.gpu_worker.machine_limits import MachineLimits
from services.gpu_worker.roofline import Machine

_TELL_EVERY_S = 0.5


class BenchError(Exception):
    """It cannot be measured; one line."""


def tell(**content: object) -> None:
    """Prints a line at once."""
    print(json.dumps(content, ensure_ascii=False), flush=True)


class StepCount:
    """Tells what is measured at present and how far it is, at most twice a second: it is told between steps."""

    def __init__(self, stage: str, num_steps: int, clock: Callable[[], float] = perf_counter) -> None:
        """Tells that the stage begins."""
        self._stage = stage
        self._num_steps = num_steps
        self._clock = clock
        self._num_done = 0
        self._told_s = clock()
        tell(now=stage)

    def add(self) -> None:
        """One more step is done."""
        self._num_done += 1
        now_s = self._clock()
        if now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            tell(now=f"{self._stage}, {self._num_done} of {self._num_steps} steps")


@contextmanager
def logs_told() -> Iterator[None]:
    """While entered, what the worker would log is told as what it does now: its start says so how far it is."""
    worker, handler = logging.getLogger("services.gpu_worker"), _Teller()
    level = worker.level
    worker.addHandler(handler)
    worker.setLevel(logging.INFO)
    try:
        yield
    finally:
        worker.removeHandler(handler)
        worker.setLevel(level)


class _Teller(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tell(now=record.getMessage())


def tell_machine(machine: Machine) -> None:
    """What it is measured on, and the limits that shares are of."""
    limits = machine.limits
    tell(
        machine={
            "device": machine.device,
            "name": machine.name,
            "dtype": machine.dtype,
            "threads": machine.num_threads,
            "bytes_per_s": limits.bytes_per_s,
            "operations_per_s": limits.operations_per_s,
        }
    )


def beside_limits(seconds: float, num_bytes: int, num_operations: int, limits: MachineLimits) -> dict[str, object]:
    """Rates, the share of the limit, and what that is of."""
    memory_s, compute_s = num_bytes / limits.bytes_per_s, num_operations / limits.operations_per_s
    return {
        "bytes_per_s": num_bytes / seconds,
        "operations_per_s": num_operations / seconds,
        "bound": "memory" if memory_s >= compute_s else "compute",
        "share": max(memory_s, compute_s) / seconds,
    }
