"""gpu_worker: what a matrix of a published quantized checkpoint is once it is taken out of its packing.

All of them decode to float32; in these few steps, which are the reference of whatever is done faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.gpu_worker.weight_grid import GROUP, WeightGrid

GRID_BITS = 4
"""Of the grids that packed matrices are kept on."""


class Decoded(Protocol):
    """A matrix out of its packing."""

    def values(self) -> Tensor:
        """The weights: [out_features, in_features] float32."""

    def grid(self) -> WeightGrid | None:
        """The same on a 4-bit grid, None where it does not lie on one."""


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """weight = (code - zero) * scale, with a scale and a zero for each group of inputs of each output.

    Attributes:
        codes: [out_features, in_features] uint8, below 2^bits.
        scales: [out_features, num_groups] float32.
        zeros: likewise.
        group_of: [in_features] int64, the group of each input.
        bits: 4 or 8.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor
    bits: int

    def values(self) -> Tensor:
        """See `Decoded.values`."""
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
        return self.codes.to(torch.float32).sub_(zeros).mul_(scales)

    def grid(self) -> WeightGrid | None:
        """See `Decoded.grid`: 4 bits, and all inputs that share a scale of the grid are of one group."""
        if self.bits != GRID_BITS or not keeps_neighbours(self.group_of):
            return None
        first = self.group_of[::GROUP]
        scales = self.scales[:, first]
        return WeightGrid(self.codes, scales, -self.zeros[:, first] * scales)


@dataclass(frozen=True, slots=True)
class ScaledNumbers:
    """weight = number * scale, with a scale for each block of neighbouring rows and columns.

    Attributes:
        numbers: [out_features, in_features] in 8-bit floating point.
        scales: [num_row_blocks, num_column_blocks] float32.
        block: rows and columns of a block; the last ones may be cut off.
    """

    numbers: Tensor
    scales: Tensor
    block: tuple[int, int]

    def values(self) -> Tensor:
        """See `Decoded.values`."""
        rows, columns = (torch.arange(size) // step for size, step in zip(self.numbers.shape, self.block, strict=True))
        return self.numbers.to(torch.float32).mul_(self.scales[rows][:, columns])

    def grid(self) -> WeightGrid | None:
        """See `Decoded.grid`: never."""
        return None


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes out of 32-bit words, the lowest bits first.

    Args:
        words: [num_rows, num_words] int32.
        bits: of a code, 4 or 8.

    Returns:
        [num_rows, num_words * 32 / bits] uint8.
    """
    raw = words.contiguous().view(torch.uint8)  # lowest byte first, as on all machines that torch runs on
    if bits == 8:
        return raw
    return torch.stack((raw & 0x0F, raw >> 4), dim=-1).view(len(words), -1)


def keeps_neighbours(group_of: Tensor) -> bool:
    """Whether all inputs that share a scale of the grid are of one group; `group_of`: [num_inputs] integers."""
    if len(group_of) % GROUP:
        return False
    by_scale = group_of.view(-1, GROUP)
    return bool((by_scale == by_scale[:, :1]).all())


def in_order(num_inputs: int, group_size: int) -> Tensor:
    """The group of each input where groups follow each other: [num_inputs] int64."""
    return torch.arange(num_inputs) // group_size
