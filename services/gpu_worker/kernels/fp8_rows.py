"""gpu_worker: inputs of 8-bit products rounded in one kernel, each token with a scale of its own.

The plain way is `products.fp8.round_rows`.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from services.gpu_worker.fp8 import E4M3
from services.gpu_worker.kernels.jit import kernel, power_of_two
from services.gpu_worker.kernels.pool_tiles import as_kept
from services.gpu_worker.products.fp8 import LEAST_MAXIMUM

_MOST = torch.finfo(E4M3).max


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """A `products.fp8.RoundRows`: x [num_tokens, width] contiguous."""
    num_tokens, width = x.shape
    codes = torch.empty((num_tokens, width), dtype=E4M3, device=x.device)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    block = power_of_two(width)
    _round_row[(num_tokens,)](
        x,
        codes,
        scales,
        least=LEAST_MAXIMUM,
        most=_MOST,
        width=width,
        block=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return codes, scales


@kernel
def _round_row(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    least: tl.constexpr,
    most: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    is_there = columns < width
    numbers = tl.load(x + token * width + columns, mask=is_there, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), 0), least) / most
    tl.store(scales + token, scale)
    tl.store(codes + token * width + columns, as_kept(numbers / scale, codes.dtype.element_ty), mask=is_there)
