"""gpu_worker: which of several ways of attention is the fastest on a device: measured there, at the start.

Two steps are timed that differ most: rows that decode, and a chunk on top of a cached prefix. Steps in which all rows
decode may go another way than the others. What does not give the reference's numbers is not taken, however fast.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from services.gpu_worker.attention.backend import AttentionBackend, CapturableAttention, StepAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.step_inputs import StepInputs, StepRow, build_step_inputs

_RUNS, _LAYERS = 4, 8  # of each step; of a run, so that the device has something to do while the host launches
_MOST_DIFFERENCE = 0.05  # of numbers around 1, in half precision

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """What attention is to be computed.

    Attributes:
        device: where.
        dtype: of the model.
        shape: of the pool.
        num_heads: query heads of the model.
        rounds_prompts: see `PagedCpuAttention`.
    """

    device: torch.device
    dtype: torch.dtype
    shape: KvCacheShape
    num_heads: int
    rounds_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that a layer takes of a step that decodes, and of one with a chunk."""

    decode_s: float
    chunk_s: float


@dataclass(frozen=True, slots=True)
class Size:
    """Of the steps that are timed: rows and tokens of each row, of which the chunk computes half."""

    num_rows: int = 16
    num_tokens: int = 1024


class SplitAttention:
    """A `CapturableAttention`: one for steps in which all rows decode, and one for the others."""

    def __init__(self, decode: CapturableAttention, others: AttentionBackend) -> None:
        self._decode = decode
        self._others = others

    def begin_step(self, inputs: StepInputs, kv_cache: KvCache) -> StepAttention:
        """See `AttentionBackend.begin_step`."""
        decodes = all(length == 1 for length in inputs.query_lengths)
        return (self._decode if decodes else self._others).begin_step(inputs, kv_cache)

    def begin_decode(self, inputs: StepInputs, kv_cache: KvCache) -> StepAttention:
        """See `CapturableAttention.begin_decode`."""
        return self._decode.begin_decode(inputs, kv_cache)


def fastest_attention(
    candidates: Mapping[str, AttentionBackend], task: AttentionTask, size: Size | None = None
) -> AttentionBackend:
    """The fastest of several, or two of them joined.

    Args:
        candidates: by name, at least one; where all of them fail, the first.
        task: what they are for.
        size: of what is timed.
    """
    first, *others = candidates.values()
    if not others:
        return first
    times = measure(candidates, task, size or Size())
    if not times:
        return first
    capturable = {name: each for name, each in candidates.items() if isinstance(each, CapturableAttention)}
    decode, chunk = choose(times, capturable.keys())
    logger.info(
        "attention measured: %s; decode by %s, chunks by %s",
        ", ".join(f"{name} {1e6 * each.decode_s:.0f} and {1e6 * each.chunk_s:.0f} us" for name, each in times.items()),
        decode,
        chunk,
    )
    if decode == chunk or decode not in capturable:
        return candidates[decode]
    return SplitAttention(capturable[decode], candidates[chunk])


def choose(times: Mapping[str, Times], capturable: Collection[str]) -> tuple[str, str]:
    """Who decodes and who does the rest, by name.

    Only what can be captured decodes, where there is such; else one does both, the one with the least sum.

    Args:
        times: of each, at least one.
        capturable: those whose decode can be captured.
    """
    able = [name for name in times if name in capturable]
    if not able:
        best = min(times, key=lambda name: times[name].decode_s + times[name].chunk_s)
        return best, best
    return min(able, key=lambda name: times[name].decode_s), min(times, key=lambda name: times[name].chunk_s)


def measure(candidates: Mapping[str, AttentionBackend], task: AttentionTask, size: Size) -> dict[str, Times]:
    """Times of those that give the reference's numbers; a warning about each of the others."""
    decode, chunk = (_Trial(task, size, num_rows, num_new) for num_rows, num_new in (
        (size.num_rows, 1), (1, size.num_tokens // 2)))  # fmt: skip
    times = {}
    for name, backend in candidates.items():
        try:
            if decode.is_right(backend) and chunk.is_right(backend):
                times[name] = Times(decode.seconds(backend), chunk.seconds(backend))
            else:
                logger.warning("attention %s: does not give the reference's numbers here, it is not used", name)
        except (RuntimeError, ValueError, TypeError) as error:
            logger.warning("attention %s: does not run here, it is not used: %s", name, _first_line(error))
    return times


class _Trial:
    """One step over a small pool of one layer."""

    def __init__(self, task: AttentionTask, size: Size, num_rows: int, num_new: int) -> None:
        shape = replace(task.shape, num_layers=1)
        pages_of_row = -(-size.num_tokens // shape.page_size)
        self._kv_cache = KvCache(shape, num_rows * pages_of_row, task.device)
        generator = torch.Generator(task.device).manual_seed(0)
        for pool in (self._kv_cache.keys, self._kv_cache.values):
            pool.copy_(torch.randn(pool.shape, generator=generator, device=task.device))
        rows = [
            StepRow([0] * num_new, size.num_tokens - num_new, range(row * pages_of_row, (row + 1) * pages_of_row), True)
            for row in range(num_rows)
        ]
        self._inputs = build_step_inputs(rows, shape.page_size, task.device)
        heads = (self._inputs.num_tokens, task.num_heads, shape.head_dim)
        self._queries = torch.randn(heads, generator=generator, device=task.device).to(task.dtype)
        self._expected = self._attend(ReferenceAttention(), 1)

    def is_right(self, backend: AttentionBackend) -> bool:
        """Whether it gives the reference's numbers."""
        return float((self._attend(backend, 1).float() - self._expected.float()).abs().max()) <= _MOST_DIFFERENCE

    def seconds(self, backend: AttentionBackend) -> float:
        """Of a layer: the shortest of some runs."""
        return min(self._run_s(backend) for _ in range(_RUNS))

    def _run_s(self, backend: AttentionBackend) -> float:
        self._wait()
        begin = perf_counter()
        self._attend(backend, _LAYERS)
        self._wait()
        return (perf_counter() - begin) / _LAYERS

    def _attend(self, backend: AttentionBackend, num_layers: int) -> Tensor:
        step = backend.begin_step(self._inputs, self._kv_cache)
        return [step.attend(0, self._queries, None) for _ in range(num_layers)][-1]

    def _wait(self) -> None:
        if self._queries.is_cuda:
            torch.cuda.synchronize(self._queries.device)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
