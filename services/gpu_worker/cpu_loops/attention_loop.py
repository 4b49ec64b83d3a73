"""gpu_worker: attention of decoding rows over the paged pool, reading keys and values where they lie.

One task is one row and one key/value head with the query heads that share it, so that each key and value is read once;
where there are too few such tasks for the threads, a task is a single query head. What is computed for a head is the
same either way. While one page is read the next one is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.gpu_worker.cpu_loops.head_vectors import (
    KEYS,
    LANES,
    QUERIES,
    VECTORS,
    add_values,
    fetch_lines,
    largest_of,
    number_at,
    put_number,
    score_keys,
)
from services.gpu_worker.cpu_loops.jit import (
    compiled,
    exponential,
    floats,
    int64s,
    integers,
    loop,
    num_threads,
    share,
    thread,
)

_FETCHED = 16  # tokens at the beginning of the next page; in a longer one the processor foresees what follows


@compiled
def _exponentials(at: int, length: int) -> np.float32:
    """Of [length] float32 at an address, less the largest of them, in place; returns their sum."""
    scores = floats(at, length)
    whole = length - length % LANES
    most = largest_of(at, whole)
    for i in range(whole, length):
        most = max(most, scores[i])
    total = np.float32(0)
    for i in range(length):
        scores[i] = exponential(scores[i] - most)
        total += scores[i]
    return total


@compiled
def _score(
    bits: int, queries: int, query: int, keys: int, step: int, count: int, dim: int, scores: int, line: int
) -> None:
    """Products of queries with `count` keys of a pool, `step` bytes apart; scores of each query, `line` bytes apart."""
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    i = 0
    while i < count:
        together = KEYS if i + KEYS <= count else 1
        for g in range(0, queries, QUERIES):
            heads = min(QUERIES, queries - g)
            place = scores + g * line + 4 * i
            score_keys(bits, heads, together, query + 4 * g * dim, keys + i * step, step, dim, place, line, scale)
        i += together


@compiled
def _add_values(
    bits: int, queries: int, result: int, values: int, step: int, count: int, dim: int, weights: int, line: int
) -> None:
    """Adds `count` values of a pool, `step` bytes apart, each with its weight; of each query, `line` bytes apart."""
    k = 0
    while k < dim:
        together = VECTORS if k + VECTORS * LANES <= dim else 1
        part = values + bits // 8 * k
        for g in range(0, queries, QUERIES):
            heads = min(QUERIES, queries - g)
            total = result + 4 * (g * dim + k)
            add_values(bits, heads, together, total, 4 * dim, part, step, count, weights + g * line, line)
        k += together * LANES


@loop
def DECODE_ATTENTION(pointer: Any) -> None:  # noqa: N802
    """Computes out [rows, heads, dim] of queries [tokens, heads, dim], each over its row's tokens up to itself.

    With a window > 0 it sees itself and the `window - 1` tokens before it. The pool's numbers have 32 or 16 bits.
    """
    (
        queries, queries_stride, tokens, pages, pages_stride, positions, window, keys_pool, values_pool, out, scratch,
        longest, rows, num_heads, num_kv_heads, dim, page_size, bits,
    ) = integers(pointer, 18)  # fmt: skip
    shared_by = num_heads // num_kv_heads
    group = shared_by if rows * num_kv_heads >= 2 * num_threads() else 1
    tasks_of_row = num_heads // group
    token_bytes, head_bytes, line_bytes = bits // 8 * num_kv_heads * dim, 4 * dim, 4 * longest
    scores = scratch + thread() * shared_by * (line_bytes + 4)
    totals = scores + shared_by * line_bytes
    token_of = int64s(tokens, rows)
    first_task, end_task = share(rows * tasks_of_row)
    for task in range(first_task, end_task):
        row, head = task // tasks_of_row, task % tasks_of_row * group
        end = int64s(positions + 8 * token_of[row], 1)[0] + 1
        first = max(0, end - window) if window > 0 else 0
        page_ids = int64s(pages + 8 * row * pages_stride, pages_stride)
        query = queries + 4 * token_of[row] * queries_stride + head * head_bytes
        result = out + (row * num_heads + head) * head_bytes
        kv_head = head // shared_by * dim * bits // 8
        first_page, end_page = first // page_size, (end - 1) // page_size + 1
        for page in range(first_page, end_page):
            begin, stop = max(first, page * page_size), min(end, (page + 1) * page_size)
            if page + 1 < end_page:
                next_page = page_ids[page + 1] * page_size * token_bytes + kv_head
                fetch_lines(keys_pool + next_page, token_bytes, min(page_size, _FETCHED), dim * bits // 8)
            slot = page_ids[page] * page_size + begin - page * page_size
            keys, place = keys_pool + slot * token_bytes + kv_head, scores + 4 * (begin - first)
            _score(bits, group, query, keys, token_bytes, stop - begin, dim, place, line_bytes)
        sums = floats(result, group * dim)
        for k in range(group * dim):
            sums[k] = np.float32(0)
        for g in range(group):
            put_number(totals + 4 * g, _exponentials(scores + g * line_bytes, end - first))
        for page in range(first_page, end_page):
            begin, stop = max(first, page * page_size), min(end, (page + 1) * page_size)
            if page + 1 < end_page:
                next_page = page_ids[page + 1] * page_size * token_bytes + kv_head
                fetch_lines(values_pool + next_page, token_bytes, min(page_size, _FETCHED), dim * bits // 8)
            slot = page_ids[page] * page_size + begin - page * page_size
            values, place = values_pool + slot * token_bytes + kv_head, scores + 4 * (begin - first)
            _add_values(bits, group, result, values, token_bytes, stop - begin, dim, place, line_bytes)
        for g in range(group):
            factor = np.float32(1) / number_at(totals + 4 * g)
            for k in range(g * dim, (g + 1) * dim):
                sums[k] *= factor
