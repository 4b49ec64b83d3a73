"""gpu_worker: attention of a row's new tokens on a CPU, apart over those computed before and over themselves.

No mask is read for what all of them see, and the query heads that share a key/value head go through the computed
tokens as one, so that these are laid out for the products once. Each part is rounded to the dtype of the queries; they
are joined by the sums of their weights (as FlashAttention does with blocks of keys, arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """Attention over a part of the positions each, and the logarithms of the weights' sums.

    Attributes:
        before: [num_kv_heads, group, num_new, head_dim], over the tokens computed before; numbers of a head lie side by
            side.
        before_sums: [num_kv_heads, group, num_new] float32.
        own: likewise, over the new tokens, each up to itself.
        own_sums: likewise.
    """

    before: Tensor
    before_sums: Tensor
    own: Tensor
    own_sums: Tensor


def by_head(queries: Tensor, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[num_kv_heads, group, num_new, head_dim] contiguous, from [num_new, num_heads, head_dim]."""
    num_new, num_heads, head_dim = queries.shape
    heads = queries.to(dtype).view(num_new, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return heads.permute(1, 2, 0, 3).contiguous()


def attend_parts(queries: Tensor, keys: Tensor, values: Tensor) -> Parts:
    """Both parts.

    Args:
        queries: from `by_head`.
        keys: [length, num_kv_heads, head_dim] of more positions than there are queries, the new ones last.
        values: likewise.
    """
    num_kv_heads, group, num_new, head_dim = queries.shape
    num_before = len(keys) - num_new
    keys, values = keys.permute(1, 0, 2)[None], values.permute(1, 0, 2)[None]  # [1, num_kv_heads, length, head_dim]
    together = queries.view(1, num_kv_heads, group * num_new, head_dim)
    before, before_sums = _attend(together, keys[:, :, :num_before], values[:, :, :num_before], is_causal=False)
    own_keys, own_values = (part[0, :, None, num_before:].expand(-1, group, -1, -1) for part in (keys, values))
    own, own_sums = _attend(queries, own_keys, own_values, is_causal=True)
    return Parts(before.view(own.shape), before_sums.view(own_sums.shape), own, own_sums)


def joined(parts: Parts) -> Tensor:
    """Attention over all positions: [num_new, num_heads, head_dim] float32."""
    part = torch.sigmoid(parts.before_sums - parts.own_sums)[..., None]  # of the tokens computed before
    numbers = torch.lerp(parts.own.to(torch.float32), parts.before.to(torch.float32), part)
    return numbers.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of [a, b, n, head_dim], and the logarithms of its weights' sums: [a, b, n] float32."""
    attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, is_causal)
    return attended, sums
