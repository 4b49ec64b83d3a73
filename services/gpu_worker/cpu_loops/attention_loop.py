"""gpu_worker: attention of decoding rows over the paged pool, reading keys and values where they lie.

One task is one row, whose keys and values are read once, page by page as they lie in memory. Where there are too few
rows for the threads, a task is one key/value head of a row with the query heads that share it, and where there are too
few of these, a single query head. What is computed for a head is the same either way. While some tokens are read the
next ones, which may lie anywhere, are asked for one by one: many at once would be in each other's way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.gpu_worker.cpu_loops.head_vectors import (
    KEYS,
    LANES,
    QUERIES,
    REGISTER,
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

_TOGETHER = 16
"""Most tokens between asking for a key or value and reading it."""


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
    bits: int, queries: int, query: int, keys: int, step: int, count: int, dim: int, scores: int, line: int, ahead: int
) -> None:
    """Products of queries with `count` keys of a pool, `step` bytes apart; scores of each query, `line` bytes apart.

    What lies `ahead` bytes behind each key is asked for.
    """
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    i = 0
    while i < count:
        together = KEYS if i + KEYS <= count else 1
        fetch_lines(keys + i * step + ahead, step, together, dim * bits // 8)
        for g in range(0, queries, QUERIES):
            heads = min(QUERIES, queries - g)
            place = scores + g * line + 4 * i
            score_keys(bits, heads, together, query + 4 * g * dim, keys + i * step, step, dim, place, line, scale)
        i += together


@compiled
def _add_values(
    bits: int, queries: int, result: int, values: int, step: int, count: int, dim: int, weights: int, line: int,
    ahead: int,
) -> None:  # fmt: skip
    """Adds `count` values of a pool, `step` bytes apart, each with its weight; of each query, `line` bytes apart.

    What lies `ahead` bytes behind each value is asked for.
    """
    k = 0
    while k < dim:
        together = VECTORS if k + VECTORS * REGISTER <= dim else 1
        part = values + bits // 8 * k
        for g in range(0, queries, QUERIES):
            heads = min(QUERIES, queries - g)
            total = result + 4 * (g * dim + k)
            add_values(bits, heads, together, total, 4 * dim, part, step, count, weights + g * line, line, ahead)
        k += together * REGISTER


@compiled
def _heads_of_a_task(rows: int, num_heads: int, num_kv_heads: int) -> int:
    """Query heads of a row that one thread computes together."""
    wanted = 2 * int(num_threads())
    if rows >= wanted:
        return num_heads
    return num_heads // num_kv_heads if rows * num_kv_heads >= wanted else 1


@compiled
def _go_through(
    is_scored: bool, bits: int, numbers: int, pool: int, then: int, token_bytes: int, pages: int, page_size: int,
    first: int, end: int, dim: int, group: int, sharing: int, scores: int, line: int,
) -> None:  # fmt: skip
    """Scores the keys of a row's tokens [first, end) for queries, or adds its values to results.

    Args:
        is_scored: which of both.
        bits: of the pool's numbers.
        numbers: address of the queries or results, [group, dim].
        pool: address of the keys or values of the first of their key/value heads.
        then: what is read afterwards.
        token_bytes: from one token's to the next one's.
        pages: address of the row's page table.
        page_size: tokens.
        first: of the tokens.
        end: behind the last.
        dim: of a head.
        group: query heads, those that share a key/value head side by side.
        sharing: how many share one.
        scores: address of [group, end - first] scores or weights.
        line: bytes from one line of them to the next.
    """
    end_page = (end - 1) // page_size + 1
    page_ids = int64s(pages, end_page)
    at = first
    while at < end:
        page = at // page_size
        stop = min(end, (page + 1) * page_size, at + _TOGETHER)
        here = pool + (page_ids[page] * page_size + at % page_size) * token_bytes
        following = pool + page_ids[min(page + 1, end_page - 1)] * page_size * token_bytes
        if stop == end:
            following = then
        elif stop % page_size != 0:
            following = here + (stop - at) * token_bytes
        for g in range(0, group, sharing):
            head, place = numbers + 4 * g * dim, scores + g * line + 4 * (at - first)
            ahead, count = following - here, stop - at
            if is_scored:
                _score(bits, sharing, head, here, token_bytes, count, dim, place, line, ahead)
            else:
                _add_values(bits, sharing, head, here, token_bytes, count, dim, place, line, ahead)
            here += dim * bits // 8
            following += dim * bits // 8
        at = stop


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
    group = _heads_of_a_task(rows, num_heads, num_kv_heads)
    sharing = min(group, shared_by)  # of them, query heads with one key/value head
    tasks_of_row = num_heads // group
    token_bytes, head_bytes, line_bytes = bits // 8 * num_kv_heads * dim, 4 * dim, 4 * longest
    scores = scratch + thread() * num_heads * (line_bytes + 4)
    totals = scores + num_heads * line_bytes
    token_of = int64s(tokens, rows)
    first_task, end_task = share(rows * tasks_of_row)
    for task in range(first_task, end_task):
        row, head = task // tasks_of_row, task % tasks_of_row * group
        end = int64s(positions + 8 * token_of[row], 1)[0] + 1
        first = max(0, end - window) if window > 0 else 0
        row_pages = pages + 8 * row * pages_stride
        query = queries + 4 * token_of[row] * queries_stride + head * head_bytes
        result = out + (row * num_heads + head) * head_bytes
        kv_head = head // shared_by * dim * bits // 8
        start = int64s(row_pages + 8 * (first // page_size), 1)[0] * page_size + first % page_size
        values = values_pool + kv_head
        _go_through(
            True, bits, query, keys_pool + kv_head, values + start * token_bytes, token_bytes, row_pages, page_size,
            first, end, dim, group, sharing, scores, line_bytes,
        )  # fmt: skip
        sums = floats(result, group * dim)
        for k in range(group * dim):
            sums[k] = np.float32(0)
        for g in range(group):
            put_number(totals + 4 * g, _exponentials(scores + g * line_bytes, end - first))
        _go_through(
            False, bits, result, values, values, token_bytes, row_pages, page_size, first, end, dim, group, sharing,
            scores, line_bytes,
        )  # fmt: skip
        for g in range(group):
            factor = np.float32(1) / number_at(totals + 4 * g)
            for k in range(g * dim, (g + 1) * dim):
                sums[k] *= factor
