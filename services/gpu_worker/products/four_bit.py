"""gpu_worker: products with matrices kept as 4-bit codes, through torch's own operator for CPUs.

The operator takes inputs in bfloat16 and, for each 32 weights of a row, a scale and a middle value in bfloat16:
weight = (code - 8) * scale + middle. A grid's float32 scale and minimum are rounded to that once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from services.gpu_worker.weight_grid import GROUP, WeightGrid

_ROWS_MULTIPLE = 16  # of a matrix, as the operator wants it
_INNER_TILES = 1  # a number that the operator takes and does not use on a CPU
_MIDDLE_CODE = 8


def fits_four_bit(grid: WeightGrid) -> bool:
    """Whether the operator can take the matrix."""
    return grid.num_bits == 4 and grid.codes.shape[0] % _ROWS_MULTIPLE == 0 and has_four_bit_products()


@functools.cache
def has_four_bit_products() -> bool:
    """Whether this build of torch has the operator for this processor: found out by a small product."""
    codes = torch.zeros(_ROWS_MULTIPLE, GROUP, dtype=torch.uint8)
    scales = torch.zeros(_ROWS_MULTIPLE, 1)
    try:
        FourBitProjection(WeightGrid(codes, scales, scales), None)(torch.zeros(1, GROUP))
    except (AttributeError, RuntimeError):  # torch does not know its name, or has no kernel behind it
        return False
    return True


class FourBitProjection:
    """A `Projection` over codes; inputs and results are in float32.

    Args:
        grid: the matrix, one that `fits_four_bit`.
        bias: [out_features] float32 or None.
    """

    def __init__(self, grid: WeightGrid, bias: Tensor | None) -> None:
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(grid.codes.to(torch.int32), _INNER_TILES)
        middles = grid.minimums + _MIDDLE_CODE * grid.scales
        pairs = torch.stack((grid.scales, middles), dim=-1)  # [out_features, num_groups, 2]
        self._scales = pairs.transpose(0, 1).to(torch.bfloat16).contiguous()  # [num_groups, out_features, 2]
        self._bias = bias
        self.num_bytes = self._codes.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection.__call__`."""
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16), self._codes, GROUP, self._scales
        )
        wide = product.to(x.dtype)
        return wide if self._bias is None else wide.add_(self._bias)
