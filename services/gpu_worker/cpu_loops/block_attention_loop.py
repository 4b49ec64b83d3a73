"""gpu_worker: attention of a prompt's tokens in float32, for processors without registers for tiles.

A thread takes some blocks of 16 new tokens of query heads that share a key/value head, and goes through the keys and
values that they see in segments which stay in its caches, out of the pages they lie in:

    scores [96 keys, 16 queries] = keys [96, dim] * queries [dim, 16]
    weights                      = 2^(scores - the largest so far)
    sums [dim, 16]              += values [96, dim] * weights                  the sums before rescaled

as FlashAttention goes through blocks of keys (arXiv 2205.14135), but with rows and columns changed: a query has a lane
of its own. What is computed for a token does not depend on the chunk it comes in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.gpu_worker.cpu_loops.block_vectors import (
    KEYS_TOGETHER,
    LINE_BYTES,
    STATE_BYTES,
    add_block,
    score_block,
    weigh_block,
    widen_head,
)
from services.gpu_worker.cpu_loops.head_vectors import LANES
from services.gpu_worker.cpu_loops.jit import compiled, floats, int64s, integers, loop, share, thread

_SEGMENT = 96
"""Keys, and values, that are read together: with 64 dimensions 48 KB."""

_TOGETHER = 16
"""Most blocks that a thread reads them for, so that queries and sums stay in its caches too."""

_LOG2_E = np.float32(1.44269504088896341)
_HIDDEN = np.float32(-3e38)  # not -inf: where all keys of a segment are hidden, nothing becomes NaN


def scratch_bytes(dim: int) -> int:
    """What each thread works in."""
    return 4 * dim * (2 * _SEGMENT + 2 * _TOGETHER * LANES) + _SEGMENT * LINE_BYTES + _TOGETHER * STATE_BYTES


@compiled
def _turn_queries(turned: int, query: int, stride: int, count: int, dim: int) -> None:
    """Lays out [dim, 16] of [count, dim] queries, `stride` bytes apart, scaled; what is missing is zero."""
    scale = _LOG2_E / np.sqrt(np.float32(dim))
    lanes = floats(turned, dim * LANES)
    for i in range(count):
        numbers = floats(query + i * stride, dim)
        for k in range(dim):
            lanes[k * LANES + i] = scale * numbers[k]
    for i in range(count, LANES):
        for k in range(dim):
            lanes[k * LANES + i] = np.float32(0)


@compiled
def _begin(state_at: int, sums_at: int, dim: int) -> None:
    state, sums = floats(state_at, 3 * LANES), floats(sums_at, dim * LANES)
    for i in range(LANES):
        state[i] = -np.inf
        state[LANES + i] = np.float32(0)
    for k in range(dim * LANES):
        sums[k] = np.float32(0)


@compiled
def _hide(scores: int, first: int, count: int, position: int, window: int) -> None:
    """Scores of keys [first, first + count) that come behind a query, or before its window; queries at `position`."""
    for i in range(count):
        key = first + i
        line = floats(scores + LINE_BYTES * i, LANES)
        for lane in range(min(LANES, key - position)):
            line[lane] = _HIDDEN
        if window > 0:
            for lane in range(max(0, key - position + window), LANES):
                line[lane] = _HIDDEN


@compiled
def _add_values(values: int, count: int, weights: int, fall: int, sums: int, dim: int) -> None:
    k = 0
    while k < dim:
        left = dim - k
        number = KEYS_TOGETHER if left >= KEYS_TOGETHER else 4 if left >= 4 else 2
        add_block(number, values + 4 * k, 4 * dim, count, weights, fall, sums + LINE_BYTES * k)
        k += number


@compiled
def _write(out: int, stride: int, count: int, sums_at: int, state_at: int, dim: int) -> None:
    sums, totals = floats(sums_at, dim * LANES), floats(state_at + LINE_BYTES, LANES)
    for i in range(count):
        result, factor = floats(out + i * stride, dim), np.float32(1) / totals[i]
        for k in range(dim):
            result[k] = sums[k * LANES + i] * factor


@compiled
def _block(task: int, steps: int, group: int, new: int) -> tuple[int, int, int]:
    """Of a task: its first new token, how many it has, and its query head.

    First and last tokens in turn: those at the end of a prompt see more, and all threads are to take as long.
    """
    kv_head, index = task // (group * steps), task % (group * steps)
    turn = index // group
    begin = LANES * (turn // 2 if turn % 2 == 0 else steps - 1 - turn // 2)
    return begin, min(LANES, new - begin), kv_head * group + index % group


@loop
def BLOCK_ATTENTION(pointer: Any) -> None:  # noqa: N802
    """Computes out [new, heads, dim] of queries [new, heads, dim], at positions from `start` on, each up to itself.

    With a window > 0 it sees itself and the `window - 1` tokens before it. The pool's numbers have 32 or 16 bits. Each
    thread works in `room` bytes of scratch: see `scratch_bytes`.
    """
    (
        queries, queries_stride, keys_pool, values_pool, pages, out, scratch, room, new, start, window, num_heads,
        num_kv_heads, dim, page_size, bits,
    ) = integers(pointer, 16)  # fmt: skip
    group, steps, head_bytes = num_heads // num_kv_heads, -(-new // LANES), dim * bits // 8
    page_ids = int64s(pages, (start + new - 1) // page_size + 1)
    keys = scratch + thread() * room
    values = keys + 4 * dim * _SEGMENT
    turned = values + 4 * dim * _SEGMENT
    sums = turned + dim * LINE_BYTES * _TOGETHER
    scores = sums + dim * LINE_BYTES * _TOGETHER
    states = scores + _SEGMENT * LINE_BYTES
    block_bytes = dim * LINE_BYTES
    task, end_task = share(num_kv_heads * group * steps)
    while task < end_task:
        kv_head = task // (group * steps)
        count = min(_TOGETHER, end_task - task, (kv_head + 1) * group * steps - task)
        first_key, end_key = start + new, 0
        for b in range(count):
            begin, here, head = _block(task + b, steps, group, new)
            query = queries + 4 * (begin * queries_stride + head * dim)
            _turn_queries(turned + block_bytes * b, query, 4 * queries_stride, here, dim)
            _begin(states + STATE_BYTES * b, sums + block_bytes * b, dim)
            first_key = min(first_key, max(0, start + begin + 1 - window) if window > 0 else 0)
            end_key = max(end_key, start + begin + here)
        for first in range(first_key // _SEGMENT * _SEGMENT, end_key, _SEGMENT):
            for i in range(min(_SEGMENT, end_key - first)):
                position = max(first + i, first_key)  # what lies before, nobody sees
                slot = page_ids[position // page_size] * page_size + position % page_size
                offset = (slot * num_kv_heads + kv_head) * head_bytes
                widen_head(keys + 4 * dim * i, keys_pool + offset, dim, bits)
                widen_head(values + 4 * dim * i, values_pool + offset, dim, bits)
            for b in range(count):
                begin, here, head = _block(task + b, steps, group, new)
                position = start + begin
                seen = min(_SEGMENT, position + here - first)
                if seen <= 0 or (window > 0 and first + _SEGMENT <= position + 1 - window):
                    continue
                state = states + STATE_BYTES * b
                whole = -(-seen // KEYS_TOGETHER) * KEYS_TOGETHER
                score_block(keys, whole, dim, turned + block_bytes * b, scores)
                if first + seen > position + 1 or (window > 0 and first <= position + LANES - 1 - window):
                    _hide(scores, first, seen, position, window)
                weigh_block(scores, seen, state)
                _add_values(values, seen, scores, state + 2 * LINE_BYTES, sums + block_bytes * b, dim)
        for b in range(count):
            begin, here, head = _block(task + b, steps, group, new)
            target = out + 4 * (begin * num_heads + head) * dim
            _write(target, 4 * num_heads * dim, here, sums + block_bytes * b, states + STATE_BYTES * b, dim)
        task += count
