"""gpu_worker: what kernels share of the pool: how a tile of a row's keys and values is read, and how a number is kept.

Numbers of 8 bits are rounded here and then converted, which is exact: so all devices, and the interpreter, do alike.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from services.gpu_worker.kernels.jit import kernel_part

LOG2_E = 1.4426950408889634
_TILE_ELEMENTS = 8192  # of keys in one go: 64 tokens of 128 wide heads


def tile_tokens(queries: Tensor, dim_block: int) -> int:
    """Tokens of a tile: a power of two, at least 16, fewer where elements or heads are wide."""
    return max(16, _TILE_ELEMENTS // dim_block // (queries.element_size() // 2))


def takes_float32(queries: Tensor) -> bool:
    """Whether products take float32 operands: for float32 itself, and on the CPU, where bfloat16 has no products."""
    return queries.dtype == torch.float32 or queries.is_cpu


@kernel_part
def load_tile(
    keys: tl.tensor,
    values: tl.tensor,
    pages: tl.tensor,
    at: tl.tensor,
    is_read: tl.tensor,
    kv_head: tl.tensor,
    dims: tl.tensor,
    page_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Keys and values of one head at the row's positions `at`, 0 where they are not read: [tokens, dims] of `dtype`."""
    page = tl.load(pages + at // page_size, mask=is_read, other=0)
    slot = (page * page_size + at % page_size).to(tl.int64)
    places = (slot[:, None] * num_kv_heads + kv_head) * head_dim + dims[None, :]
    is_there = is_read[:, None] & (dims < head_dim)[None, :]
    key = tl.load(keys + places, mask=is_there, other=0.0)
    value = tl.load(values + places, mask=is_there, other=0.0)
    return key.to(dtype), value.to(dtype)


@kernel_part
def as_kept(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Numbers as a pool of this type keeps them: see `fp8.to_fp8`."""
    if dtype == tl.float8e4nv:
        x = _rounded(x.to(tl.float32), 20, 2.0**-6, 1.5 * 2.0**14, 448.0)
    if dtype == tl.float8e5:
        x = _rounded(x.to(tl.float32), 21, 2.0**-14, 1.5 * 2.0**7, 57344.0)
    return x.to(dtype)


@kernel_part
def _rounded(
    x: tl.tensor, num_dropped: tl.constexpr, least: tl.constexpr, shift: tl.constexpr, most: tl.constexpr
) -> tl.tensor:
    """Rounds float32 to a shorter fraction, ties to even.

    From `least` on, `num_dropped` bits of the fraction go. Below, steps are of one size: a sum with `shift`, whose last
    bit is such a step, rounds to it. Beyond `most`, numbers become `most`.
    """
    bits = x.to(tl.int32, bitcast=True)
    half = (1 << (num_dropped - 1)) - 1 + ((bits >> num_dropped) & 1)
    cut = (bits + half) & -(1 << num_dropped)
    rounded = tl.where(tl.abs(x) < least, (x + shift) - shift, cut.to(tl.float32, bitcast=True))
    rounded = tl.where(rounded > most, most, rounded)
    rounded = tl.where(rounded < -most, -most, rounded)
    return tl.where(x != x, x, rounded)  # the sum above would make another number of a NaN
