"""gpu_worker: queries and keys rotated, keys and values in their slots, in one kernel.

The plain way is `rotary.rotate` and `KvCache.write`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from services.gpu_worker.kernels.jit import kernel, power_of_two
from services.gpu_worker.kernels.pool_tiles import as_kept

_MANY_TOKENS = 64  # from here on a program does several of them


@dataclass(frozen=True, slots=True)
class Pool:
    """One layer of the pool: [num_pages, page_size, num_kv_heads, head_dim] contiguous each, and [num_tokens] slots."""

    keys: Tensor
    values: Tensor
    slots: Tensor


def rotate_and_write(heads: Tensor, values: Tensor, cos_sin: tuple[Tensor, Tensor], pool: Pool) -> Tensor:
    """Rotates queries and keys by their positions, and stores keys and values.

    Args:
        heads: [num_tokens, num_heads + num_kv_heads, head_dim], queries, then keys; a token's heads side by side.
        values: [num_tokens, num_kv_heads, head_dim]; likewise.
        cos_sin: [num_tokens, 1, head_dim] contiguous each, from `rotary_cos_sin`.
        pool: where the tokens' keys and values go.

    Returns:
        The queries, [num_tokens, num_heads, head_dim].
    """
    num_tokens, num_kv_heads, head_dim = values.shape
    num_heads = heads.shape[1] - num_kv_heads
    queries = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    cos, sin = cos_sin
    token_block = 1 if num_tokens < _MANY_TOKENS else 16
    _rotate_and_write[(-(-num_tokens // token_block), num_heads + 2 * num_kv_heads)](
        heads,
        values,
        cos,
        sin,
        pool.slots,
        queries,
        pool.keys,
        pool.values,
        num_tokens,
        heads.stride(0),
        values.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        token_block=token_block,
        half_block=power_of_two(head_dim // 2),
        num_warps=1 if token_block == 1 else 4,
    )
    return queries


@kernel
def _rotate_and_write(
    heads: tl.tensor,
    new_values: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    num_tokens: tl.tensor,
    heads_stride: tl.tensor,
    values_stride: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    token_block: tl.constexpr,
    half_block: tl.constexpr,
) -> None:
    """One head of some tokens."""
    head = tl.program_id(1)
    half = head_dim // 2
    tokens = tl.program_id(0).to(tl.int64) * token_block + tl.arange(0, token_block)
    dims = tl.arange(0, half_block)
    is_token = tokens < num_tokens
    is_there = is_token[:, None] & (dims < half)[None, :]
    slot = tl.load(slots + tokens, mask=is_token, other=0)
    if head >= num_heads + num_kv_heads:
        value = head - num_heads - num_kv_heads
        at = tokens[:, None] * values_stride + value * head_dim + dims[None, :]
        place = (slot * num_kv_heads + value)[:, None] * head_dim + dims[None, :]
        low_value = tl.load(new_values + at, mask=is_there, other=0.0)
        high_value = tl.load(new_values + at + half, mask=is_there, other=0.0)
        tl.store(values + place, as_kept(low_value, values.dtype.element_ty), mask=is_there)
        tl.store(values + place + half, as_kept(high_value, values.dtype.element_ty), mask=is_there)
    else:
        at = tokens[:, None] * heads_stride + head * head_dim + dims[None, :]
        low = tl.load(heads + at, mask=is_there, other=0.0).to(tl.float32)
        high = tl.load(heads + at + half, mask=is_there, other=0.0).to(tl.float32)
        turn = tokens[:, None] * head_dim + half + dims[None, :]  # the second half's sine has the plain sign
        cosine = tl.load(cos + turn, mask=is_there, other=0.0).to(tl.float32)
        sine = tl.load(sin + turn, mask=is_there, other=0.0).to(tl.float32)
        turned_low = (low * cosine - high * sine).to(heads.dtype.element_ty)
        turned_high = (high * cosine + low * sine).to(heads.dtype.element_ty)
        if head < num_heads:
            place = (tokens * num_heads + head)[:, None] * head_dim + dims[None, :]
            tl.store(queries + place, turned_low, mask=is_there)
            tl.store(queries + place + half, turned_high, mask=is_there)
        else:
            place = (slot * num_kv_heads + head - num_heads)[:, None] * head_dim + dims[None, :]
            tl.store(keys + place, as_kept(turned_low, keys.dtype.element_ty), mask=is_there)
            tl.store(keys + place + half, as_kept(turned_high, keys.dtype.element_ty), mask=is_there)
