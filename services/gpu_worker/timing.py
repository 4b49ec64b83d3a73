"""gpu_worker: how long something takes that is run again and again: by the clock on a CPU, by events on a device."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

_LEAST_RUNS, _MOST_RUNS = 3, 64


def run_times_s(device: torch.device, run: Callable[[], object], most_s: float) -> list[float]:
    """Seconds of each of many runs, together about `most_s`; a slow machine runs no more than a few.

    The first one is not counted: it sets up what there is to set up.
    """

    def timed() -> float:
        return _event_s(device, run) if device.type == "cuda" else _clock_s(run)

    timed()
    times: list[float] = []
    while len(times) < _LEAST_RUNS or (len(times) < _MOST_RUNS and sum(times) < most_s):
        times.append(timed())
    return times


def _clock_s(run: Callable[[], object]) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin


def _event_s(device: torch.device, run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
