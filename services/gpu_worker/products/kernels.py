"""gpu_worker: products with weights that were laid out once for a CPU's kernels.

oneDNN reads a matrix fastest in blocks of its own; torch lays it out anew at every call unless it is given the blocks.
The operators are those that torch's own compiler calls with frozen weights.

    packed float32     the same numbers as the plain product, but for the order of the sums
    packed bfloat16    weights and inputs rounded to 8 bits of mantissa, sums in float32, half the bytes; only where the
                       processor multiplies bfloat16 itself, elsewhere it would be slower than float32
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

PACKED_ROWS = 64
"""Rows that the blocks are laid out for; any number may come."""


class PackedProjection:
    """A `Projection` over oneDNN's blocks, in the dtype of its weights; inputs and results are in float32 or in that.

    Args:
        weight: [out_features, in_features], on the CPU.
        bias: [out_features] float32 or None.
        dtype: of the blocks, float32 or bfloat16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), PACKED_ROWS)
        self._bias = None if bias is None else bias.to(dtype)
        self.num_bytes = weight.numel() * dtype.itemsize + (0 if bias is None else bias.nbytes)

    @property
    def rounds_from(self) -> int | None:
        """See `RoundsInputs`."""
        return 0 if self._dtype == torch.bfloat16 else None

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection.__call__`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(self._dtype), self._blocks, self._bias, "none", [], ""
        )
        return product.to(x.dtype)


@functools.cache
def has_packed_float32() -> bool:
    """Whether this build of torch has oneDNN and its packed products: found out by a small one."""
    try:
        PackedProjection(torch.zeros(1, 1), None, torch.float32)(torch.zeros(1, 1))
    except (AttributeError, RuntimeError):  # torch does not know its name, or has no kernel behind it
        return False
    return True


def has_fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 numbers, and torch knows how to ask for it."""
    return has_packed_float32() and bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
