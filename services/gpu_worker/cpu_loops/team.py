"""gpu_worker: the threads that run a loop: torch's own, so that no second pool takes their cores away.

torch's CPU builds for Linux bring GNU's OpenMP library. What a compiler makes of a parallel region is one call of it:
`GOMP_parallel(function, argument, number of threads, flags)`, after which each thread asks who it is. That interface
is what the library promises to compiled programs (gcc.gnu.org/onlinedocs/libgomp, "Implementing parallel regions").
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import llvmlite.binding
import torch
from torch import Tensor

LARGE_WORK = 32768
"""Numbers to compute from which on a loop is shared: some ten microseconds of one thread, what waking others costs."""

_SYMBOLS = ("omp_get_thread_num", "omp_get_num_threads")


@dataclass(frozen=True, slots=True)
class Heard:
    """What a team was asked for while somebody listened.

    Attributes:
        loops: those to run, in order, each with its arguments.
        scratches: what they work in.
    """

    loops: list[tuple[int, array[int]]] = field(default_factory=list)
    scratches: list[Tensor] = field(default_factory=list)


class Team:
    """Runs compiled loops, on the calling thread or on all of torch's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Takes the library that torch has loaded, and makes it known to the compiler."""
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._heard: Heard | None = None
        for name in _SYMBOLS:
            llvmlite.binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)

    def scratch(self, num_bytes: int) -> int:
        """The address of so many bytes for the next loop; each call may hand out the same."""
        if num_bytes > self._scratch.nbytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        if self._heard is not None:
            self._heard.scratches.append(self._scratch)
        return self._scratch.data_ptr()

    def run(self, loop: int, arguments: array[int], is_large: bool) -> None:
        """Runs a loop once.

        Args:
            loop: address of a function that takes a pointer to `arguments`.
            arguments: 64-bit integers, addresses among them; what they point to must live until this returns.
            is_large: whether the work is worth waking other threads for (some ten microseconds).
        """
        if self._heard is not None:
            self._heard.loops.append((loop, arguments))
            return
        self.run_on(torch.get_num_threads() if is_large else 1, loop, arguments)

    def run_on(self, num_threads: int, loop: int, arguments: array[int]) -> None:
        """Runs a loop on so many threads."""
        self._parallel(loop, arguments.buffer_info()[0], num_threads, 0)

    @contextmanager
    def listen(self) -> Iterator[Heard]:
        """Notes loops instead of running them. One at a time may listen."""
        assert self._heard is None
        self._heard = Heard()
        try:
            yield self._heard
        finally:
            self._heard = None


def _find_team() -> Team | None:
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return None
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        name = line.rpartition(" ")[2]
        if "/libgomp" in name:
            return Team(ctypes.CDLL(name))
    return None


TEAM = _find_team()
"""None where torch was built with another library."""
