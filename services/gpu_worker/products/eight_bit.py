"""gpu_worker: products with matrices kept as 8-bit integers, through oneDNN's integer products.

Inputs must be integers too. Rounded to 8 bits they would lose what few large ones among many small ones say, and with
one scale for all rows a request would change its neighbours'. So each row has its own scale and about 15 bits, as two
rows of integers: input = (128 * high + low) * step. Sums are exact, results in float32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from services.gpu_worker.products.kernels import PACKED_ROWS

_LOW_VALUES = 128
_MOST = 127 * _LOW_VALUES + 63  # so that the high part is within 8 bits
_MOST_CODE = 127
_LEAST_INPUT = 1e-30  # a row of zeros has a step too


class EightBitProjection:
    """A `Projection` over integers; inputs and results are in float32.

    Args:
        codes: [out_features, in_features] int8.
        scales: [out_features] float32; weight = code * scale.
        bias: [out_features] float32 or None.
    """

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._blocks = torch.ops.onednn.qlinear_prepack(codes, [PACKED_ROWS, codes.shape[1]])
        self._scales = scales
        self._zero = torch.zeros(1, dtype=torch.int64)  # of all rows
        self._bias = bias
        self.num_bytes = codes.nbytes + scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection.__call__`."""
        num_rows = len(x)
        steps = x.abs().amax(dim=1, keepdim=True).clamp_min_(_LEAST_INPUT).mul_(1 / _MOST)
        low = (x / steps).round_()
        high = (low * (1 / _LOW_VALUES)).round_()
        low.sub_(high, alpha=_LOW_VALUES)
        sums: Tensor = torch.ops.onednn.qlinear_pointwise(
            torch.cat((high, low)).to(torch.int8), 1.0, 0, self._blocks, self._scales, self._zero, None, 1.0, 0,
            torch.float32, "none", [], "",
        )  # fmt: skip
        product = torch.add(sums[num_rows:], sums[:num_rows], alpha=_LOW_VALUES).mul_(steps)
        return product if self._bias is None else product.add_(self._bias)


@functools.cache
def has_eight_bit_products() -> bool:
    """Whether this build of torch has oneDNN's integer products, and they are exact here: found out by a small one.

    Where a processor has no instruction that adds products of bytes to 32 bits (VNNI), oneDNN adds pairs of them in 16,
    which cannot hold two large ones: it takes them for 32,767.
    """
    codes, scales = torch.full((16, 32), _MOST_CODE, dtype=torch.int8), torch.ones(16)
    try:
        product = EightBitProjection(codes, scales, None)(torch.ones(1, 32))
    except (AttributeError, RuntimeError):  # torch does not know its name, or has no kernel behind it
        return False
    return torch.allclose(product, torch.tensor(32.0 * _MOST_CODE), rtol=1e-3)
