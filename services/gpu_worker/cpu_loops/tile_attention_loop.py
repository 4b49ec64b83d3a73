"""gpu_worker: attention of a prompt's tokens on the registers for tiles (see `tile_registers`), in two loops.

The first lays out keys and values of one row as tiles of bfloat16, out of the pages they lie in. The second takes a
query head and 32 of its new tokens at a time:

    scores [32 keys, 32 queries] = keys [32, dim] * queries [dim, 32]
    weights                      = exp(scores - the largest so far)            a query has a lane
    sums [dim, 32]              += values [dim, 32] * weights [32, 32]         the sums before rescaled

as FlashAttention goes through blocks of keys (arXiv 2205.14135), but with rows and columns changed: so nothing is added
up across a register, and weights are inputs of the next product as they come. Keys, values, queries and weights are
rounded to bfloat16; scores and sums are float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.gpu_worker.cpu_loops.jit import compiled, floats, int64s, integers, loop, num_threads, share, thread
from services.gpu_worker.cpu_loops.tile_registers import (
    DEPTH,
    LINE_BYTES,
    SHAPES_BYTES,
    TILE,
    TILE_BYTES,
    multiply_tiles,
    release_registers,
    set_registers,
)
from services.gpu_worker.cpu_loops.tile_vectors import (
    SCORES_STEP,
    STATE_BYTES,
    rescale_sums,
    round_key,
    store_turned,
    turn_queries,
    turn_values,
    weigh_keys,
)

BLOCK = 2 * TILE
"""Keys, and values, that are laid out together, and that scores are computed for."""

QUERIES_TOGETHER = 2 * TILE

_SCORES_BYTES, _WEIGHTS_BYTES = BLOCK * SCORES_STEP, 2 * BLOCK * QUERIES_TOGETHER  # of a block

BYTES_BY_DIMENSION = 2 * QUERIES_TOGETHER + SCORES_STEP
"""Of what each thread works in: queries and sums."""

BYTES_BESIDE = _SCORES_BYTES + _WEIGHTS_BYTES + 2 * STATE_BYTES
"""And scores and weights, and how far they are."""


@loop
def LAY_OUT_KV(pointer: Any) -> None:  # noqa: N802
    """Lays out [length] keys and values of a row in bfloat16, and zeros up to whole `BLOCK` of them.

    keys [kv_heads, blocks, dim / 32, BLOCK, 32] and values [kv_heads, blocks, dim, BLOCK]
    """
    (
        keys, values, keys_pool, values_pool, pages, page_size, length, num_kv_heads, dim, bits, zeros, scratch,
    ) = integers(pointer, 12)  # fmt: skip
    blocks, size = -(-length // BLOCK), bits // 8
    page_ids = int64s(pages, -(-length // page_size))
    places_at = scratch + 8 * BLOCK * thread()
    places = int64s(places_at, BLOCK)
    first, end = share(num_kv_heads * blocks)
    for task in range(first, end):
        head, block = task // blocks, task % blocks
        of_keys, of_values = keys + 2 * BLOCK * dim * task, values + 2 * BLOCK * dim * task
        for i in range(BLOCK):
            position = BLOCK * block + i
            key = value = zeros
            if position < length:
                slot = page_ids[position // page_size] * page_size + position % page_size
                offset = (slot * num_kv_heads + head) * dim * size
                key, value = keys_pool + offset, values_pool + offset
            for depth in range(dim // DEPTH):
                round_key(of_keys + LINE_BYTES * (BLOCK * depth + i), key + DEPTH * size * depth, bits)
            places[i] = value
        for part in range(dim // TILE):
            turn_values(of_values + TILE_BYTES * part, places_at, TILE * size * part, bits)


@compiled
def _hide_later(scores: int, first: int, position: int) -> None:
    """Scores of keys that come behind a query: minus infinity. Keys begin at `first`, queries at `position`."""
    for key in range(max(first, position + 1), first + BLOCK):
        line = floats(scores + SCORES_STEP * (key - first), QUERIES_TOGETHER)
        for k in range(min(QUERIES_TOGETHER, key - position)):
            line[k] = -np.inf


@compiled
def _begin(sums: int, states: int, dim: int) -> None:
    numbers = floats(sums, dim * QUERIES_TOGETHER)
    for k in range(dim * QUERIES_TOGETHER):
        numbers[k] = np.float32(0)
    for half in range(2):
        state = floats(states + STATE_BYTES * half, 2 * TILE)
        for k in range(TILE):
            state[k] = -np.inf
            state[TILE + k] = np.float32(0)


@compiled
def _score(scores: int, keys: int, turned: int, dim: int) -> None:
    multiply_tiles(2, 2, 0, keys, LINE_BYTES, LINE_BYTES * BLOCK, turned, dim // DEPTH, scores, SCORES_STEP)


@compiled
def _add(sums: int, values: int, weights: int, dim: int) -> None:
    for part in range(dim // (2 * TILE)):
        at, to = values + 2 * TILE_BYTES * part, sums + 2 * TILE * SCORES_STEP * part
        multiply_tiles(2, 2, 1, at, LINE_BYTES, 0, weights, 1, to, SCORES_STEP)


@loop
def TILE_ATTENTION(pointer: Any) -> None:  # noqa: N802
    """Computes out [new, heads, dim] of queries [new, heads, dim], at positions from `start` on, each up to itself."""
    (
        queries, queries_stride, keys, values, out, scratch, shapes, new, start, num_heads, num_kv_heads, dim,
    ) = integers(pointer, 12)  # fmt: skip
    length = start + new
    blocks = -(-length // BLOCK)
    group, steps = num_heads // num_kv_heads, -(-new // QUERIES_TOGETHER)
    turned = scratch + thread() * (dim * BYTES_BY_DIMENSION + BYTES_BESIDE)
    sums = turned + 2 * QUERIES_TOGETHER * dim
    scores = sums + SCORES_STEP * dim
    weights = scores + _SCORES_BYTES
    states = weights + _WEIGHTS_BYTES
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    set_registers(shapes + SHAPES_BYTES * TILE)
    # In turn, because those at the end of a prompt see more than those at its beginning.
    for task in range(thread(), num_kv_heads * steps * group, num_threads()):
        kv_head, head, begin = task // (steps * group), task % group, task // group % steps * QUERIES_TOGETHER
        head += kv_head * group
        count = min(QUERIES_TOGETHER, new - begin)
        query = queries + 4 * (begin * queries_stride + head * dim)
        for half in range(2):
            of_half = query + 4 * TILE * half * queries_stride
            for depth in range(dim // DEPTH):
                target = turned + TILE_BYTES * (half * (dim // DEPTH) + depth)
                turn_queries(target, of_half + 4 * DEPTH * depth, 4 * queries_stride, count - TILE * half)
        _begin(sums, states, dim)
        position = start + begin
        of_head = 2 * dim * BLOCK * blocks * kv_head
        for block in range(-(-(position + count) // BLOCK)):
            place = of_head + 2 * dim * BLOCK * block
            _score(scores, keys + place, turned, dim)
            if (block + 1) * BLOCK > position + 1:
                _hide_later(scores, BLOCK * block, position)
            for half in range(2):
                state = states + STATE_BYTES * half
                weigh_keys(scores + LINE_BYTES * half, BLOCK, weights + TILE_BYTES * half, state, scale)
                rescale_sums(state, sums + LINE_BYTES * half, dim)
            _add(sums, values + place, weights, dim)
        for half in range(2):
            for part in range(dim // TILE):
                target = out + 4 * (((begin + TILE * half) * num_heads + head) * dim + TILE * part)
                of_part = sums + LINE_BYTES * half + TILE * SCORES_STEP * part
                store_turned(target, 4 * num_heads * dim, count - TILE * half, of_part, states + STATE_BYTES * half)
    release_registers()
