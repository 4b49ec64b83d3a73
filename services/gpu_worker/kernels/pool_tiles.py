"""gpu_worker: what attention kernels share: how the pool is read, a tile of a row's keys and values at a time."""

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
    in_float32: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Keys and values of one head at the row's positions `at`, 0 where they are not read: [tokens, dims] each."""
    page = tl.load(pages + at // page_size, mask=is_read, other=0)
    slot = (page * page_size + at % page_size).to(tl.int64)
    places = (slot[:, None] * num_kv_heads + kv_head) * head_dim + dims[None, :]
    is_there = is_read[:, None] & (dims < head_dim)[None, :]
    key = tl.load(keys + places, mask=is_there, other=0.0)
    value = tl.load(values + places, mask=is_there, other=0.0)
    if in_float32:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    return key, value
