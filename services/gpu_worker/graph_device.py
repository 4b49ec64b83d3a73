"""gpu_worker: what recording a step and replaying it needs of a device.

A CUDA graph is the launches of a piece of work without the program that made them: replayed they cost the host next to
nothing. They read and write the very memory that they were recorded with, and every number that the host put into a
launch stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Recording(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Puts all of it into the device's queue once more."""


class GraphDevice(Protocol):
    """A device that records. One recording at a time is replayed: they share the memory of what they compute."""

    def record(self, run: Callable[[], None]) -> Recording:
        """Runs it once for what is set up at a first time (kernels compiled, workspaces), then records it."""


class CudaGraphDevice:
    """A `GraphDevice` of CUDA graphs in one pool of memory; made for the largest first, the others fit into it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Recording:
        """See `GraphDevice.record`. Nothing is recorded on the stream that steps run on: it has work of its own."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            run()
            # Other threads only look at events; what they do does not end the recording.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph
