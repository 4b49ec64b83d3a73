"""gpu_worker: rounds a matrix to integers at load, for `--quantization`.

int4    a scale and a minimum for each 32 neighbours of a row, such as torch's 4-bit operator has: bfloat16 numbers
int8    a scale for each 32 neighbours too, a number in half precision as GGUF's Q8_0 has it; where our loop cannot run,
        a scale for each row, the largest weight of it being 127
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.gpu_worker.weight_grid import GROUP, WeightGrid

_MOST_FOUR_BITS = 15
_MIDDLE_CODE = 8
_MOST_EIGHT_BITS = 127
_SIGN = 128


def rounded_to_four_bits(weight: Tensor) -> WeightGrid:
    """The nearest grid; `weight`: [num_rows, num_columns] float32, whole groups in each row."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = torch.aminmax(groups, dim=-1)
    scales = _bfloat16((high - low) / _MOST_FOUR_BITS)
    minimums = _bfloat16(low + _MIDDLE_CODE * scales) - _MIDDLE_CODE * scales
    steps = torch.where(scales > 0, scales, 1)  # a group of equal numbers: all of them are the minimum
    codes = ((groups - minimums[..., None]) / steps[..., None]).round_().clamp_(0, _MOST_FOUR_BITS)
    return WeightGrid(codes.to(torch.uint8).view(weight.shape), scales, minimums)


def rounded_to_groups_of_eight_bits(weight: Tensor) -> WeightGrid:
    """The nearest grid of 8 bits; `weight`: [num_rows, num_columns] float32, whole groups in each row.

    Scales are in half precision, unless that has not the range for them: then `fits_grid_loop` will refuse the grid.
    """
    groups = weight.view(len(weight), -1, GROUP)
    scales = _half(groups.abs().amax(-1) / _MOST_EIGHT_BITS)
    steps = torch.where(scales > 0, scales, 1)
    codes = (groups / steps[..., None]).round_().clamp_(-_SIGN, _SIGN - 1).add_(_SIGN)
    return WeightGrid(codes.to(torch.uint8).view(weight.shape), scales, -_SIGN * scales, 8)


def rounded_to_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [num_rows, num_columns] int8 and scales [num_rows] float32 of a matrix in float32."""
    scales = weight.abs().amax(dim=1) / _MOST_EIGHT_BITS
    steps = torch.where(scales > 0, scales, 1)
    return (weight / steps[:, None]).round_().to(torch.int8), scales


def _half(numbers: Tensor) -> Tensor:
    narrow = numbers.to(torch.float16).to(torch.float32)
    return narrow if bool((narrow - numbers).abs().max() <= 2**-11 * numbers.max()) else numbers


def _bfloat16(numbers: Tensor) -> Tensor:
    return numbers.to(torch.bfloat16).to(torch.float32)
