"""gpu_worker: numbers of 8 bits with a sign, an exponent and a fraction (arXiv 2209.05433), as torch keeps them.

    e4m3   largest 448, steps of an eighth within a power of two; NaN, no infinity
    e5m2   largest 57,344, steps of a quarter

Beyond the largest, a number becomes the largest; NaN stays NaN. (torch's own conversion has done both, by version.)
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether numbers of this type have 8 bits."""
    return dtype in (E4M3, E5M2)


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to nearest, ties to even: the same shape in `E4M3` or `E5M2`."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """The same memory as uint8: torch moves these numbers about in few ways, bytes in all."""
    return x.view(torch.uint8)
