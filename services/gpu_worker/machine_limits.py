"""gpu_worker: what the machine can do at most, measured at the start: the roof that steps are held against.

Two numbers bound every step: bytes a second out of memory, and operations a second of a large product (S. Williams et
al., "Roofline", CACM 52/4, 2009). They are measured with the threads, on the device and in the dtype of the worker,
before it has any request: never beside work. What else the machine does at that moment makes them smaller.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from services.gpu_worker.fp8 import E4M3
from services.gpu_worker.host_limits import available_memory_bytes, core_waits_s
from services.gpu_worker.models.projection import Projection
from services.gpu_worker.products.fp8 import FP8_SIDES
from services.gpu_worker.products.kernels import PackedProjection, has_fast_bfloat16, has_packed_float32
from services.gpu_worker.products.tiles import TileProjection, has_tile_loop
from services.gpu_worker.timing import run_times_s

_READING_S, _PRODUCTS_S, _TRIAL_S = 0.04, 0.05, 0.005  # runs are repeated for so long
_CPU_SIDE, _TRIAL_SIDE = 1024, 256
_LONG_S = 0.15  # a product that takes longer is not run for the sake of a number
_PART_BYTES = 64 * 2**20  # read at once on a CPU: a run that another process disturbs is one of many
_CUDA_SIDE = 8192
_LEAST_CPU_BYTES, _MOST_CPU_BYTES = 64 * 2**20, 256 * 2**20
_CUDA_BYTES = 2**30
_UPLOAD_BYTES = 64 * 2**20
_TIMES_CACHE = 4  # the buffer is so much larger than the largest cache, where memory allows it
_MEMORY_SHARE = 8  # and takes at most this part of what is free
_LINE = 1024  # numbers in a line of the matrix that the buffer is taken for
_MOST_STRETCH = 100.0  # a longer wait says no more
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Measured.

    Attributes:
        bytes_per_s: read from the device's memory.
        operations_per_s: of a large product.
        upload_bytes_per_s: from page-locked memory of the host to the device; 0 where the device is the host.
        spread: how far this can be off, as a factor, as far as can be seen: by what the best repeat exceeds the median
            one, or by what the clock exceeds the time for which each thread had its core. 1 where nothing else runs.
    """

    bytes_per_s: float
    operations_per_s: float
    upload_bytes_per_s: float = 0.0
    spread: float = 1.0


class Rate(NamedTuple):
    """A second's work in the best and in the median of many repeats; the larger one of two has the larger best."""

    best: float
    usual: float

    @classmethod
    def of(cls, amount: float, times_s: Sequence[float]) -> Rate:
        """Of repeats that did so much each. The best counts: what else the machine does only makes them longer."""
        return cls(amount / min(times_s), amount / median(times_s))


def machine_limits(device: torch.device, dtype: torch.dtype) -> MachineLimits:
    """Measures a device; the same again in this process is known already.

    Args:
        device: where the model runs.
        dtype: that products are computed in.
    """
    return _measured(device, dtype, torch.get_num_threads())


@functools.cache
def _measured(device: torch.device, dtype: torch.dtype, num_threads: int) -> MachineLimits:
    if device.type == "cpu":
        return _measure_cpu(device, dtype, num_threads)
    free, _ = torch.cuda.mem_get_info(device)
    num_bytes = min(_CUDA_BYTES, free // (2 * _MEMORY_SHARE))
    return _limits(
        measure_reading(device, num_bytes),
        measure_products(device, dtype, min(_CUDA_SIDE, isqrt(num_bytes // 16) // FP8_SIDES * FP8_SIDES)),
        _measure_upload(device, min(_UPLOAD_BYTES, num_bytes)),
    )


def _limits(reading: Rate, products: Rate, upload_bytes_per_s: float = 0.0, stretch: float = 1.0) -> MachineLimits:
    spread = max(stretch, *(rate.best / rate.usual for rate in (reading, products)))
    return MachineLimits(reading.best, products.best, upload_bytes_per_s, spread)


def _measure_cpu(device: torch.device, dtype: torch.dtype, num_threads: int) -> MachineLimits:
    """The best of all threads and of one: threads that wait for each other on a busy machine are slower than one."""
    buffer = _buffer(device, cpu_buffer_bytes())
    reading, products, stretch = [], [], 1.0
    try:
        for count in sorted({1, num_threads}):
            torch.set_num_threads(count)
            began_s, waits_s = perf_counter(), core_waits_s()
            reading.append(_reading_rate(buffer))
            products.append(_measure_cpu_products(dtype))
            stretch = max(stretch, _stretch(perf_counter() - began_s, waits_s, core_waits_s()))
    finally:
        torch.set_num_threads(num_threads)
    return _limits(max(reading), max(products), stretch=stretch)


def _stretch(seconds: float, before_s: Mapping[str, float], after_s: Mapping[str, float]) -> float:
    """How many times as long it took because a thread waited for its core: repeats that all wait look alike."""
    waited_s = max((after_s[thread] - before_s.get(thread, 0.0) for thread in after_s), default=0.0)
    return seconds / max(seconds - waited_s, seconds / _MOST_STRETCH)


def cpu_buffer_bytes(caches: Path = _CACHES) -> int:
    """How much is read on a CPU: far more than its caches hold, but no large part of the memory."""
    wanted = max(_LEAST_CPU_BYTES, _TIMES_CACHE * max(_cache_sizes(caches), default=0))
    return min(wanted, _MOST_CPU_BYTES, available_memory_bytes() // _MEMORY_SHARE)


def measure_reading(device: torch.device, num_bytes: int) -> Rate:
    """Bytes a second of the fastest way that torch has to read so many bytes, one part of them after another."""
    return _reading_rate(_buffer(device, num_bytes))


def _buffer(device: torch.device, num_bytes: int) -> Tensor:
    """A matrix of so many bytes, written: memory that never was is no memory."""
    return torch.ones(max(1, num_bytes // (4 * _LINE)), _LINE, device=device)


def _reading_rate(matrix: Tensor) -> Rate:
    device, num_lines = matrix.device, len(matrix)
    if device.type == "cuda":
        target = torch.empty_like(matrix)
        summing = run_times_s(device, matrix.sum, _READING_S)
        copying = run_times_s(device, lambda: target.copy_(matrix), _READING_S)
        return max(Rate.of(matrix.nbytes, summing), Rate.of(2 * matrix.nbytes, copying))
    lines = min(num_lines, _PART_BYTES // (4 * _LINE))
    parts = [matrix[start : start + lines] for start in range(0, num_lines - lines + 1, lines)]
    vector = torch.ones(_LINE)
    part = itertools.cycle(parts)
    ways: list[Callable[[], object]] = [lambda: next(part).sum(), lambda: next(part) @ vector]
    return max(Rate.of(parts[0].nbytes, run_times_s(device, way, _READING_S / len(ways))) for way in ways)


def measure_products(device: torch.device, dtype: torch.dtype, side: int) -> Rate:
    """Operations a second of the product of two square matrices of random numbers: a GPU runs slower with these."""
    left, right = (torch.randn(side, side, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    if dtype == E4M3:
        run = functools.partial(_multiply_8_bits, left, right, torch.ones(side, 1, device=device))
    else:
        run = functools.partial(torch.matmul, left, right)
    return Rate.of(2 * side**3, run_times_s(device, run, _PRODUCTS_S))


def _multiply_8_bits(left: Tensor, right: Tensor, scales: Tensor) -> Tensor:
    """As the worker multiplies them: a scale for each row and column."""
    product: Tensor = torch._scaled_mm(
        left, right.t(), scale_a=scales, scale_b=scales.view(1, -1), out_dtype=torch.bfloat16
    )
    return product


def _measure_cpu_products(dtype: torch.dtype) -> Rate:
    """Of a large product, in the way that is fastest for a smaller one; of that alone where a large one takes long."""
    cpu = torch.device("cpu")
    trial, best = max(
        ((Rate.of(2 * _TRIAL_SIDE**3, run_times_s(cpu, way(_TRIAL_SIDE), _TRIAL_S)), way) for way in _cpu_ways(dtype)),
        key=lambda tried: tried[0],
    )
    if 2 * _CPU_SIDE**3 / trial.best > _LONG_S:
        return trial
    return Rate.of(2 * _CPU_SIDE**3, run_times_s(cpu, best(_CPU_SIDE), _PRODUCTS_S))


def _cpu_ways(dtype: torch.dtype) -> Iterator[Callable[[int], Callable[[], object]]]:
    """The ways that this machine has to multiply square matrices of a dtype: from their side, what does it."""
    yield lambda side: functools.partial(torch.matmul, *(torch.ones(side, side, dtype=dtype) for _ in range(2)))

    def by(made: Callable[[Tensor], Projection]) -> Callable[[int], Callable[[], object]]:
        return lambda side: functools.partial(made(torch.ones(side, side)), torch.ones(side, side, dtype=dtype))

    packs: dict[torch.dtype, Callable[[], bool]] = {
        torch.float32: has_packed_float32,
        torch.bfloat16: has_fast_bfloat16,
    }
    if dtype in packs and packs[dtype]():
        yield by(lambda weight: PackedProjection(weight, None, dtype))
    if dtype == torch.bfloat16 and has_tile_loop():
        yield by(lambda weight: TileProjection(weight, None))


def _measure_upload(device: torch.device, num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return num_bytes / min(run_times_s(device, lambda: target.copy_(source, non_blocking=True), _TRIAL_S))


def _cache_sizes(caches: Path) -> Iterable[int]:
    """Bytes of each cache of a core; none where the system does not tell."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    for path in caches.glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        if text[:-1].isdigit() and text[-1] in units:
            yield int(text[:-1]) * units[text[-1]]
