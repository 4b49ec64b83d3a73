"""gpu_worker: how fast this model runs on this device, measured before the first request.

What comes out decides the default prefill chunk: as many tokens as run in 300 ms on a CPU and in 50 ms on a GPU, and
how many fewer that are behind a long context, so that a long prompt never holds the decoding requests up for longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from services.gpu_worker.model_runner import ModelRunner

CPU_CHUNK_S = 0.3
GPU_CHUNK_S = 0.05
_CHUNK_STEP = 16
_MIN_CHUNK = 64  # a smaller one reads all weights for so few tokens that prompts take several times as long
_MAX_CHUNK = 8192
_CONTEXT = 2048
_MAX_CHUNK_CONTEXT = 2**20
_MAX_TOTAL_S = 1.5  # the start does not wait longer than this for a better number


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What was measured.

    Attributes:
        chunk_tokens: the prefill chunk, a multiple of 16 where it was looked for.
        chunk_s: seconds that it takes.
        decode_s: seconds of a step with one token.
        chunk_context: tokens of context behind which each token takes twice as long as in the chunk, 0 if that was not
            looked for.
    """

    chunk_tokens: int
    chunk_s: float
    decode_s: float
    chunk_context: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens computed a second."""
        return self.chunk_tokens / self.chunk_s


def chunk_limit_s(device: torch.device) -> float:
    """Seconds that a prefill chunk may take on a device."""
    return CPU_CHUNK_S if device.type == "cpu" else GPU_CHUNK_S


def warm_up(runner: ModelRunner, pump: Callable[[], None], max_model_len: int, fixed_chunk: int = 0) -> WarmUp:
    """Runs prefills of growing size on the dummy page until one takes as long as a chunk may; then behind a context.

    Args:
        runner: the model; its pool needs no pages.
        pump: called between steps, to say that this process lives.
        max_model_len: no step looks at more tokens.
        fixed_chunk: measure this chunk instead of looking for one, if > 0, and nothing behind a context.
    """
    is_cpu = runner.kv_cache.keys.is_cpu
    limit_s = chunk_limit_s(runner.kv_cache.keys.device)
    deadline = perf_counter() + _MAX_TOTAL_S

    def best(num_tokens: int, context: int = 0) -> float:
        """Of two runs the shorter one: what else the machine does only makes a run longer."""
        pump()
        seconds = _run(runner, num_tokens, context)
        return seconds if perf_counter() > deadline else min(seconds, _run(runner, num_tokens, context))

    def may_grow(num_tokens: int, seconds: float) -> bool:
        is_enough = num_tokens >= (fixed_chunk or _MAX_CHUNK) or (seconds >= 0.8 * limit_s and not fixed_chunk)
        return not is_enough and perf_counter() < deadline

    _run(runner, _MIN_CHUNK)  # the first step of a process pays for what is set up once
    decode_s = best(1)
    num_tokens, seconds = _MIN_CHUNK, best(_MIN_CHUNK)
    smallest_s = seconds
    while may_grow(num_tokens, seconds):
        num_tokens = _next_size(num_tokens, seconds, fixed_chunk, limit_s)
        seconds = best(num_tokens)
    chunk = fixed_chunk or _rounded(num_tokens * min(2.0, limit_s / seconds))
    measured = WarmUp(chunk, seconds * chunk / num_tokens, decode_s)
    # On a CPU few tokens cost in proportion; on a GPU their step is no shorter than one of many.
    sample, sample_s = (_MIN_CHUNK, smallest_s) if is_cpu else (num_tokens, seconds)
    context = 0 if fixed_chunk else min(_CONTEXT, max_model_len - sample)
    if context < _MIN_CHUNK or sample_s > _MAX_TOTAL_S:
        return measured
    behind_s = best(sample, context)
    pump()
    return replace(measured, chunk_context=_chunk_context((behind_s - sample_s) / context / sample, measured))


def _chunk_context(pair_s: float, measured: WarmUp) -> int:
    """From the seconds that a token takes longer for each token of its context."""
    token_s = 1 / measured.tokens_per_s
    if pair_s * _MAX_CHUNK_CONTEXT <= token_s:  # also when nothing was seen of it
        return _MAX_CHUNK_CONTEXT
    return max(_MIN_CHUNK, int(token_s / pair_s))


def _next_size(num_tokens: int, seconds: float, fixed_chunk: int, limit_s: float) -> int:
    """Towards the chunk, at most four times as many tokens: a small step says little about a large one."""
    if fixed_chunk:
        return min(fixed_chunk, 4 * num_tokens)
    factor = min(4.0, max(1.25, limit_s / seconds))
    return min(_MAX_CHUNK, max(num_tokens + _CHUNK_STEP, _rounded(num_tokens * factor)))


def _rounded(num_tokens: float) -> int:
    return max(_MIN_CHUNK, min(_MAX_CHUNK, int(num_tokens) // _CHUNK_STEP * _CHUNK_STEP))


def _run(runner: ModelRunner, num_tokens: int, context: int = 0) -> float:
    """Seconds of one step with so many tokens of one row, behind so many others."""
    device = runner.kv_cache.keys.device
    inputs = runner.dummy_inputs(num_tokens, 1, context)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = perf_counter()
    runner.forward(inputs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - begin
