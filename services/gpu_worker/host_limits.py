"""gpu_worker: what this process may use of its host: cores and memory, inside a container too.

A container's limits stand in its control group, which the usual calls do not look at: a worker with 2 cores of 64 that
starts 64 threads is many times slower than with 2.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.runtime.config import Settings
from services.runtime.rank_place import RankPlace

_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT_BLOCK_BYTES = 64 * 2**20  # larger blocks come and go with the system
_KEPT_BYTES = 256 * 2**20
_STARTED = 19  # of the words behind a process's name: field 22 of proc(5), ticks since the machine was started


@dataclass(frozen=True, slots=True)
class HostShare:
    """Which of the `count` worker processes of this host, [0, count), this one is: its device, its cores."""

    index: int
    count: int

    @classmethod
    def of(cls, settings: Settings, place: RankPlace | None) -> HostShare:
        """Each of `--dp-size` workers has as many processes here as there are ranks of its group."""
        local_rank, local_size = (0, 1) if place is None else (place.local_rank, place.local_size)
        return cls(settings.dp_rank * local_size + local_rank, settings.dp_size * local_size)


def num_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may run on, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = _words(cgroup / "cpu.max") or _words(cgroup / "cpu/cpu.cfs_quota_us") + _words(
        cgroup / "cpu/cpu.cfs_period_us"
    )
    if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
        return max(1, min(cores, -(-int(words[0]) // int(words[1]))))
    return cores


def keep_to_share(rank: int, count: int) -> None:
    """Keeps this process to its share of the cores, where each of `count` processes alike can have one to itself.

    Threads of several workers on the same cores wait for each other at every barrier. A limit of processor time in the
    control group says how much, not where: then the threads are divided, and the system places them.

    Args:
        rank: which of the processes this one is, in [0, count).
        count: how many there are, >= 1.
    """
    if count == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if count <= len(cores) == num_cores():
        os.sched_setaffinity(0, cores[rank * len(cores) // count : (rank + 1) * len(cores) // count])


def share_of_cores(count: int) -> int:
    """Threads for each of `count` processes alike, at least 1. To be asked before `keep_to_share`."""
    return max(1, num_cores() // count)


def total_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that this process may fill at most."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_number(cgroup / "memory.max"), _number(cgroup / "memory/memory.limit_in_bytes")]
    return min([total, *(limit for limit in limits if limit is not None)])


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that can still be filled without pushing anything out."""
    total = total_memory_bytes(cgroup)
    available = _meminfo("MemAvailable")
    used = _number(cgroup / "memory.current") or _number(cgroup / "memory/memory.usage_in_bytes") or 0
    # Where the system does not tell, half of the memory is a guess that leaves room for the others.
    return min(total // 2 if available is None else available, max(0, total - used))


def stored_bytes_read(account: Path = Path("/proc/self/io")) -> int | None:
    """Bytes that storage itself gave this process so far, the file cache aside; None where the system does not tell."""
    words = _words(account)
    place = words.index("read_bytes:") + 1 if "read_bytes:" in words else len(words)
    return int(words[place]) if place < len(words) and words[place].isdigit() else None


def core_waits_s(tasks: Path = Path("/proc/self/task")) -> dict[str, float]:
    """Of each thread of this process, by its number: seconds so far in which it could have run and others had the core.

    Empty where the system does not tell.
    """
    words = {task.parent.name: _words(task) for task in tasks.glob("*/schedstat")}
    return {thread: int(found[1]) / 1e9 for thread, found in words.items() if len(found) == 3}


def process_age_s(account: Path = Path("/proc/self/stat")) -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    try:
        behind_name = account.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    started_s = int(behind_name[_STARTED]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def keep_freed_memory() -> bool:
    """Has the C library keep what is freed instead of giving it back; False where it cannot be told.

    A step frees some tens of megabytes and the next one takes them again. Given back in between, every page of them is
    mapped and zeroed anew: half of the time of drawing 16 tokens was spent on that.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    is_set = library.mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES) and library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(is_set)


def peak_growth_bytes(run: Callable[[], None]) -> int:
    """By how much the resident memory of this process grew at most while `run` ran.

    Where the system cannot forget the highest mark of the past (outside Linux), only growth beyond that is seen.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)  # what was kept of earlier steps would hide what this one takes
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _own_memory("VmRSS")
    run()
    return max(0, _own_memory("VmHWM") - before)


def _own_memory(name: str) -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _meminfo(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None
