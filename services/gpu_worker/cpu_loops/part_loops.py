"""gpu_worker: what lies around attention in parts (see `attention.attended_parts`): numbers rounded, parts joined."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.gpu_worker.cpu_loops.head_vectors import LANES, round_halves
from services.gpu_worker.cpu_loops.jit import bfloat16s, exponential, floats, integers, loop, rounded, share, widened


@loop
def ROUND_HALVES(pointer: Any) -> None:  # noqa: N802
    """Rounds [count * LANES] numbers of half precision to bfloat16."""
    target, source, count = integers(pointer, 3)
    first, end = share(count)
    place = 2 * LANES * first
    round_halves(target + place, source + place, LANES * (end - first))


@loop
def ROUND_BY_HEAD(pointer: Any) -> None:  # noqa: N802
    """Rounds [rows, heads, dim], whose rows may lie apart, to bfloat16 [heads, rows, dim]."""
    target, source, stride, rows, heads, dim = integers(pointer, 6)
    first, end = share(rows)
    for i in range(first, end):
        for head in range(heads):
            given = floats(source + 4 * (i * stride + head * dim), dim)
            out = bfloat16s(target + 2 * (head * rows + i) * dim, dim)
            for k in range(dim):
                out[k] = rounded(given[k])


@loop
def JOIN_PARTS(pointer: Any) -> None:  # noqa: N802
    """Joins two parts in bfloat16 to out [rows, kv_heads * group, dim] float32, by the logarithms of their sums.

    Each part, and its sums, are [kv_heads, group, rows]: an address and three strides.
    """
    (
        before, before_kv, before_group, before_row, sums, sums_kv, sums_group, sums_row,
        own, own_kv, own_group, own_row, own_sums, own_sums_kv, own_sums_group, own_sums_row,
        out, rows, kv_heads, group, dim,
    ) = integers(pointer, 21)  # fmt: skip
    first, end = share(rows)
    for i in range(first, end):
        for head in range(kv_heads * group):
            a, b = head // group, head % group
            log_sum = floats(sums + 4 * (a * sums_kv + b * sums_group + i * sums_row), 1)[0]
            own_log_sum = floats(own_sums + 4 * (a * own_sums_kv + b * own_sums_group + i * own_sums_row), 1)[0]
            part = np.float32(1) / (np.float32(1) + exponential(min(own_log_sum - log_sum, np.float32(87))))
            earlier = bfloat16s(before + 2 * (a * before_kv + b * before_group + i * before_row), dim)
            later = bfloat16s(own + 2 * (a * own_kv + b * own_group + i * own_row), dim)
            result = floats(out + 4 * (i * kv_heads * group + head) * dim, dim)
            for k in range(dim):
                x, y = widened(earlier[k]), widened(later[k])
                result[k] = y + part * (x - y)
