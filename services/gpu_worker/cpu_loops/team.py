"""gpu_worker: the threads that run a loop: torch's own, so that no second pool takes their cores away.

torch's CPU builds for Linux bring GNU's OpenMP library. What a compiler makes of a parallel region is one call of it:
`GOMP_parallel(function, argument, number of threads, flags)`, after which each thread asks who it is. That interface
is what the library promises to compiled programs (gcc.gnu.org/onlinedocs/libgomp, "Implementing parallel regions").
"""

from __future__ import annotations

import ctypes
from array import array
from pathlib import Path

import llvmlite.binding
import torch

LARGE_WORK = 32768
"""Numbers to compute from which on a loop is shared: some ten microseconds of one thread, what waking others costs."""

_SYMBOLS = ("omp_get_thread_num", "omp_get_num_threads")


class Team:
    """Runs compiled loops, on the calling thread or on all of torch's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Takes the library that torch has loaded, and makes it known to the compiler."""
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        for name in _SYMBOLS:
            llvmlite.binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)

    def scratch(self, num_bytes: int) -> int:
        """The address of so many bytes for the next loop; each call may hand out the same."""
        if num_bytes > self._scratch.nbytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def run(self, loop: int, arguments: array[int], is_large: bool) -> None:
        """Runs a loop once.

        Args:
            loop: address of a function that takes a pointer to `arguments`.
            arguments: 64-bit integers, addresses among them; what they point to must live until this returns.
            is_large: whether the work is worth waking other threads for (some ten microseconds).
        """
        num_threads = torch.get_num_threads() if is_large else 1
        self._parallel(loop, arguments.buffer_info()[0], num_threads, 0)


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
