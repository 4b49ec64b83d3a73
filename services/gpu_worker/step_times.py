"""gpu_worker: the times of one step: by the clock on a CPU, by events in the device's queue on a CUDA device."""

from __future__ import annotations

from time import perf_counter

import torch


class StepClock:
    """Begins when it is made; `begin_forward`, `end_forward` and `stop` follow, the first two perhaps never."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._begin = self._mark()
        self._forward_begin = self._forward_end = self._begin
        self._end = self._begin

    def begin_forward(self) -> None:
        """The forward pass is next."""
        self._forward_begin = self._forward_end = self._mark()

    def end_forward(self) -> None:
        """The forward pass was launched."""
        self._forward_end = self._mark()

    def stop(self) -> None:
        """The last of the step was launched."""
        self._end = self._mark()

    def is_done(self) -> bool:
        """Whether everything up to `stop` has run."""
        return not isinstance(self._end, torch.cuda.Event) or bool(self._end.query())  # type: ignore[no-untyped-call]

    def wait_done(self) -> None:
        """Waits until everything up to `stop` has run."""
        if isinstance(self._end, torch.cuda.Event):
            self._end.synchronize()

    def forward_us(self) -> int:
        """Microseconds of the forward pass, once done."""
        return _between_us(self._forward_begin, self._forward_end)

    def step_us(self) -> int:
        """Microseconds of the whole step, once done; a step that waited for the one before it does not count that."""
        return _between_us(self._begin, self._end)

    def _mark(self) -> float | torch.cuda.Event:
        if not self._is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between_us(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> int:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return int(1000 * begin.elapsed_time(end))
    assert not isinstance(end, torch.cuda.Event)
    return int(1e6 * (end - begin))
