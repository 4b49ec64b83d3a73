"""gpu_worker: how large the KV pool may be, once weights are loaded and the activations of a step are measured.

    CUDA device   [ weights, others ][ KV pool ................ ][ activations ][ free ]
                  '------- mem_fraction_static of the whole ----'
    CPU           the pool takes at most a quarter of the memory: the rest is for the weights, the other processes
                  and the file cache; it is filled only as pages are used

It measures and decides; it allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from services.gpu_worker.host_limits import available_memory_bytes, peak_growth_bytes, total_memory_bytes
from services.gpu_worker.kv_cache import KvCacheShape
from services.runtime.capacity import asked_pool_tokens
from services.runtime.config import Settings
from services.runtime.service import StartError

MAX_CPU_SHARE = 0.25
LEAST_POOL_TOKENS = 512
"""A measured pool smaller than this (or than the context) serves no ordinary request: the start is refused."""

_MAX_PAGES = 2**31 - 1  # what a page id on the wire can be


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory of the device after the weights were loaded and a step was measured, in bytes.

    Attributes:
        total: of the device, or what this process may have of the host.
        available: what nobody has taken.
        weights: of the model.
        activations: most that a step takes and gives back.
        is_cpu: whether the device is the host.
        num_ranks: processes of this host that share the model, and the host's memory.
    """

    total: int
    available: int
    weights: int
    activations: int
    is_cpu: bool
    num_ranks: int = 1

    @property
    def most_for_pool(self) -> int:
        """What the pool may have when the operator sets all of it aside: everything that a step does not need."""
        return max(0, self.available - self.activations)

    def with_activations(self, activations: int) -> MemoryState:
        """The same with activations that were measured on a smaller step and scaled."""
        return replace(self, activations=activations)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What the pool gets, and the lines that tell how it came about."""

    num_pages: int
    lines: tuple[str, ...]


def measure_memory(device: torch.device, weight_bytes: int, run_largest_step: Callable[[], None]) -> MemoryState:
    """Runs the largest step once and looks at what it takes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run_largest_step()
        torch.cuda.synchronize(device)
        activations = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return MemoryState(total, free, weight_bytes, activations, is_cpu=False)
    activations = peak_growth_bytes(run_largest_step)
    return MemoryState(total_memory_bytes(), available_memory_bytes(), weight_bytes, activations, is_cpu=True)


def pool_size(memory: MemoryState, shape: KvCacheShape, settings: Settings, max_model_len: int) -> PoolSize:
    """How many pages the pool gets.

    Args:
        memory: what there is.
        shape: of a page.
        settings: kv_cache_tokens decides where it is set, else mem_fraction_static.
        max_model_len: most tokens of one request.

    Raises:
        StartError: what is set does not fit, or what is left is too little for one request. Names the numbers.
    """
    page_bytes = shape.bytes_per_page
    if settings.kv_cache_tokens:
        num_pages = asked_pool_tokens(settings) // shape.page_size
        if num_pages * page_bytes > memory.most_for_pool:
            raise StartError(
                f"--kv-cache-tokens {settings.kv_cache_tokens} takes {_size(num_pages * page_bytes)}, but "
                f"{_size(memory.most_for_pool)} are left ({_left(memory)})"
            )
    else:
        num_pages = min(_share(memory, settings) // page_bytes - 1, _MAX_PAGES)  # the dummy page
        least_tokens = min(max_model_len, LEAST_POOL_TOKENS)
        least_pages = -(-least_tokens // shape.page_size)
        if num_pages < least_pages:
            raise StartError(
                f"no memory for a KV pool: {least_tokens} tokens take {_size(least_pages * page_bytes)} in pages of "
                f"{shape.page_size}, there are {_size(max(0, _share(memory, settings)))} "
                f"({_left(memory)}); a smaller model, a higher --mem-fraction-static or --kv-cache-tokens may help"
            )
    return PoolSize(num_pages, _table(memory, shape, num_pages))


def shortage(num_tokens: int, settings: Settings, max_model_len: int) -> str:
    """What to tell of a pool of so many tokens that holds less than the longest request; "" where it holds it."""
    if num_tokens >= max_model_len:
        return ""
    more = "raise --kv-cache-tokens" if settings.kv_cache_tokens else "free memory for the pool"
    return (
        f"the KV pool holds {num_tokens:,} tokens, less than the context of {max_model_len:,}: no prompt and "
        f"answer can be longer ({more}, or set --max-model-len {num_tokens})"
    )


def _share(memory: MemoryState, settings: Settings) -> int:
    """Bytes for the pool when nobody says how many tokens it shall hold. Processes on one CPU share its memory."""
    fraction = settings.mem_fraction_static
    if memory.is_cpu:
        most, left = int(MAX_CPU_SHARE * memory.total), int(fraction * memory.available)
        num_sharing = settings.dp_size * memory.num_ranks
        return min(most // num_sharing, left // num_sharing - memory.activations)
    used = memory.total - memory.available
    return min(int(fraction * memory.total) - used, memory.most_for_pool)


def _left(memory: MemoryState) -> str:
    return (
        f"of {_size(memory.total)}, {_size(memory.available)} are free after weights of {_size(memory.weights)}, "
        f"and a step needs {_size(memory.activations)}"
    )


def _table(memory: MemoryState, shape: KvCacheShape, num_pages: int) -> tuple[str, ...]:
    pool = (num_pages + 1) * shape.bytes_per_page
    free = memory.available - pool - memory.activations
    num_tokens = num_pages * shape.page_size
    return (
        f"memory: weights     {_size(memory.weights):>10}",
        f"memory: KV pool     {_size(pool):>10}  {num_pages:,} pages of {shape.page_size}, {num_tokens:,} tokens",
        f"memory: activations {_size(memory.activations):>10}",
        f"memory: free        {_size(max(0, free)):>10}  of {_size(memory.total)}",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
