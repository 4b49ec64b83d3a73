"""gpu_worker: the residual sum and the norm that follows it, in one kernel: hidden states are read and written once."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from services.gpu_worker.kernels.jit import kernel, power_of_two


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension (as models are trained with it).

    Args:
        x: [num_tokens, width] contiguous, or [num_tokens, num_heads, width] with a token's heads side by side.
        weight: [width].
        eps: added to the mean square.

    Returns:
        The same shape and dtype, contiguous.
    """
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, normed, eps)
    return normed


def add_norm(hidden: Tensor, addend: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds to the residual stream in place, and normalises it.

    Args:
        hidden: [num_tokens, width] contiguous; holds hidden + addend afterwards, in its dtype.
        addend: [num_tokens, width] contiguous.
        weight: [width].
        eps: added to the mean square.

    Returns:
        [num_tokens, width], the norm of the sum.
    """
    normed = torch.empty_like(hidden)
    _launch(hidden, addend, weight, normed, eps)
    return normed


def _launch(x: Tensor, addend: Tensor | None, weight: Tensor, normed: Tensor, eps: float) -> None:
    width = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    block = power_of_two(width)
    _add_norm[(x.shape[0], num_heads)](
        x,
        x if addend is None else addend,
        weight,
        normed,
        eps,
        x.stride(0),
        num_heads=num_heads,
        width=width,
        has_addend=addend is not None,
        block=block,
        num_warps=min(16, max(1, block // 512)),
    )


@kernel
def _add_norm(
    hidden: tl.tensor,
    addend: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    token_stride: tl.tensor,
    num_heads: tl.constexpr,
    width: tl.constexpr,
    has_addend: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One head of one token; without heads, one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, block)
    is_there = columns < width
    at = token * token_stride + head * width + columns
    x = tl.load(hidden + at, mask=is_there, other=0.0).to(tl.float32)
    if has_addend:
        x += tl.load(addend + at, mask=is_there, other=0.0).to(tl.float32)
        rounded = x.to(hidden.dtype.element_ty)
        tl.store(hidden + at, rounded, mask=is_there)
        x = rounded.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    # Rounded before the weight multiplies, as the models were trained.
    x = x.to(hidden.dtype.element_ty).to(tl.float32)
    scaled = x * tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    out = (token * num_heads + head) * width + columns
    tl.store(normed + out, scaled.to(normed.dtype.element_ty), mask=is_there)
