"""gpu_worker: norms, gates and rotated heads as loops; see `operators.py` for what they are for."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.gpu_worker.cpu_loops.head_vectors import store_halves
from services.gpu_worker.cpu_loops.jit import (
    Bits,
    Floats,
    bfloat16s,
    compiled,
    exponential,
    floats,
    int64s,
    integers,
    loop,
    rounded,
    share,
    widened,
)


@compiled
def _norm_factor(x: Floats, width: int, eps: np.float32) -> np.float32:
    squares = np.float32(0)
    for i in range(width):
        squares += x[i] * x[i]
    return np.float32(np.float32(1) / np.sqrt(squares / np.float32(width) + eps))


@compiled
def _norm_row(x: Floats, weight: Floats, out: Floats, width: int, eps: np.float32) -> None:
    factor = _norm_factor(x, width, eps)
    for i in range(width):
        out[i] = x[i] * factor * weight[i]


@compiled
def _add_norm_row(total: Floats, added: Floats, weight: Floats, out: Floats, width: int, eps: np.float32) -> None:
    for k in range(width):
        total[k] += added[k]
    _norm_row(total, weight, out, width, eps)


@compiled
def _add_norm_row_rounded(total: Floats, added: Bits, weight: Floats, out: Bits, width: int, eps: np.float32) -> None:
    for k in range(width):
        total[k] += widened(added[k])
    factor = _norm_factor(total, width, eps)
    for k in range(width):
        out[k] = rounded(total[k] * factor * weight[k])


@loop
def NORM(pointer: Any) -> None:  # noqa: N802
    """Computes out [rows, inner, width] = norm of x [rows, inner, width]; the rows of both may lie apart."""
    x, stride, weight, out, out_stride, rows, inner, width, eps = integers(pointer, 9)
    first, end = share(rows * inner)
    gain, epsilon = floats(weight, width), floats(eps, 1)[0]
    for i in range(first, end):
        row, place = i // inner, i % inner * width
        source = floats(x + 4 * (row * stride + place), width)
        target = floats(out + 4 * (row * out_stride + place), width)
        _norm_row(source, gain, target, width, epsilon)


@loop
def ADD_NORM(pointer: Any) -> None:  # noqa: N802
    """Adds addend to hidden [rows, width] in place, and computes out, its norm; both others have so many bits."""
    hidden, addend, weight, out, rows, width, eps, bits = integers(pointer, 8)
    first, end = share(rows)
    gain, epsilon, size = floats(weight, width), floats(eps, 1)[0], bits // 8 * width
    for i in range(first, end):
        total, added, result = floats(hidden + 4 * i * width, width), addend + i * size, out + i * size
        if bits == 16:
            _add_norm_row_rounded(total, bfloat16s(added, width), gain, bfloat16s(result, width), width, epsilon)
        else:
            _add_norm_row(total, floats(added, width), gain, floats(result, width), width, epsilon)


@compiled
def _gated(gate: np.float32, up: np.float32) -> np.float32:
    return np.float32(gate / (np.float32(1) + exponential(min(-gate, np.float32(87)))) * up)


@compiled
def _gated_row(gate: Floats, up: Floats, out: Floats, width: int) -> None:
    for k in range(width):
        out[k] = _gated(gate[k], up[k])


@compiled
def _gated_row_rounded(gate: Bits, up: Bits, out: Bits, width: int) -> None:
    for k in range(width):
        out[k] = rounded(_gated(widened(gate[k]), widened(up[k])))


@loop
def GATED(pointer: Any) -> None:  # noqa: N802
    """Computes out [rows, width] = silu(gate) * up of gate_up [rows, 2 * width], in numbers of so many bits."""
    gate_up, out, rows, width, bits = integers(pointer, 5)
    first, end = share(rows)
    size = bits // 8 * width
    for i in range(first, end):
        gate, up, result = gate_up + 2 * i * size, gate_up + (2 * i + 1) * size, out + i * size
        if bits == 16:
            _gated_row_rounded(bfloat16s(gate, width), bfloat16s(up, width), bfloat16s(result, width), width)
        else:
            _gated_row(floats(gate, width), floats(up, width), floats(result, width), width)


@compiled
def _copy(target: int, source: int, count: int) -> None:
    written, read = floats(target, count), floats(source, count)
    for k in range(count):
        written[k] = read[k]


@loop
def ROTATE_AND_WRITE(pointer: Any) -> None:  # noqa: N802
    """Turns heads [rows, heads, dim] in place; stores the last kv_heads of them, and values, at each row's slot."""
    (
        heads, heads_stride, values, values_stride, cos, sin, slots, keys_pool, values_pool, rows, num_heads,
        num_kv_heads, dim, bits,
    ) = integers(pointer, 14)  # fmt: skip
    first, end = share(rows)
    half = dim // 2
    places = int64s(slots, rows)
    for i in range(first, end):
        cosine, sine = floats(cos + 4 * i * dim, dim), floats(sin + 4 * i * dim, dim)
        for head in range(num_heads + num_kv_heads):
            low = floats(heads + 4 * (i * heads_stride + head * dim), half)
            high = floats(heads + 4 * (i * heads_stride + head * dim + half), half)
            for k in range(half):
                a, b = low[k], high[k]
                low[k] = a * cosine[k] + b * sine[k]
                high[k] = b * cosine[half + k] + a * sine[half + k]
        width = num_kv_heads * dim
        place = places[i] * width * bits // 8
        turned, given = heads + 4 * (i * heads_stride + num_heads * dim), values + 4 * i * values_stride
        if bits == 16:
            store_halves(keys_pool + place, turned, width)
            store_halves(values_pool + place, given, width)
        else:
            _copy(keys_pool + place, turned, width)
            _copy(values_pool + place, given, width)
