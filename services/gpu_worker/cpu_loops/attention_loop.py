"""gpu_worker: attention of decoding rows over the paged pool, reading keys and values where they lie.

One task is one row and one key/value head with the query heads that share it, so that each key and value is read once;
where there are too few such tasks for the threads, a task is a single query head. What is computed for a head is the
same either way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.gpu_worker.cpu_loops.head_vectors import add_scaled, dot, number_at, put_number
from services.gpu_worker.cpu_loops.jit import (
    compiled,
    exponential,
    floats,
    int64s,
    integers,
    largest,
    loop,
    num_threads,
    share,
    thread,
)


@compiled
def _softmax(at: int, length: int) -> None:
    """Of [length] float32 at an address, in place."""
    scores = floats(at, length)
    most = largest(scores, length)
    total = np.float32(0)
    for i in range(length):
        scores[i] = exponential(scores[i] - most)
        total += scores[i]
    for i in range(length):
        scores[i] /= total


@loop
def DECODE_ATTENTION(pointer: Any) -> None:  # noqa: N802
    """Computes out [rows, heads, dim] of queries [tokens, heads, dim], each over its row's tokens up to itself.

    With a window > 0 it sees itself and the `window - 1` tokens before it.
    """
    (
        queries, queries_stride, tokens, pages, pages_stride, positions, window, keys_pool, values_pool, out, scratch,
        longest, rows, num_heads, num_kv_heads, dim, page_size,
    ) = integers(pointer, 17)  # fmt: skip
    shared_by = num_heads // num_kv_heads
    group = shared_by if rows * num_kv_heads >= 2 * num_threads() else 1
    tasks_of_row = num_heads // group
    token_bytes, head_bytes, line_bytes = 4 * num_kv_heads * dim, 4 * dim, 4 * longest
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    scores = scratch + thread() * shared_by * line_bytes
    token_of = int64s(tokens, rows)
    first_task, end_task = share(rows * tasks_of_row)
    for task in range(first_task, end_task):
        row, head = task // tasks_of_row, task % tasks_of_row * group
        end = int64s(positions + 8 * token_of[row], 1)[0] + 1
        first = max(0, end - window) if window > 0 else 0
        page_ids = int64s(pages + 8 * row * pages_stride, pages_stride)
        query = queries + 4 * token_of[row] * queries_stride + head * head_bytes
        result = out + (row * num_heads + head) * head_bytes
        kv_head = head // shared_by * head_bytes
        for page in range(first // page_size, (end - 1) // page_size + 1):
            begin = page * page_size
            slots = keys_pool + (page_ids[page] * page_size - begin) * token_bytes + kv_head
            for position in range(max(first, begin), min(end, begin + page_size)):
                for g in range(group):
                    score = scale * dot(query + g * head_bytes, slots + position * token_bytes, dim)
                    put_number(scores + g * line_bytes + 4 * (position - first), score)
        for g in range(group):
            _softmax(scores + g * line_bytes, end - first)
        sums = floats(result, group * dim)
        for k in range(group * dim):
            sums[k] = np.float32(0)
        for page in range(first // page_size, (end - 1) // page_size + 1):
            begin = page * page_size
            slots = values_pool + (page_ids[page] * page_size - begin) * token_bytes + kv_head
            for position in range(max(first, begin), min(end, begin + page_size)):
                for g in range(group):
                    weight = number_at(scores + g * line_bytes + 4 * (position - first))
                    add_scaled(result + g * head_bytes, slots + position * token_bytes, weight, dim)
