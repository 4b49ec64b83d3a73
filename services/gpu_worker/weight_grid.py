"""gpu_worker: matrices whose weights lie on a grid of 16 or 256 values for each 32 neighbours of a row.

Some formats of GGUF files are such grids: weight = code * scale + minimum. Kept as codes, a matrix takes an eighth or a
quarter of its float32 form, and a product of few rows, which waits for memory, so much less time.

    Q4_0    block of 32: scale f16, 16 bytes of codes; minimum = -8 * scale
    Q4_1    block of 32: scale f16, minimum f16, 16 bytes of codes
    Q4_K    block of 256: two f16 that scale 8 scales and 8 minimums of 6 bits, 4 times 32 bytes of codes
    Q8_0    block of 32: scale f16, 32 signed codes; minimum = -128 * scale

(github.com/ggml-org/ggml, docs/gguf.md and its Python package, which the tests hold this against.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Weights that share a scale."""


@dataclass(frozen=True, slots=True)
class WeightGrid:
    """A matrix of [num_rows, num_columns].

    Attributes:
        codes: [num_rows, num_columns] uint8, below 2^num_bits.
        scales: [num_rows, num_columns / GROUP] float32.
        minimums: likewise; with 8 bits -128 times the scales.
        num_bits: 4 or 8.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor
    num_bits: int = 4

    def values(self) -> Tensor:
        """The weights: [num_rows, num_columns] float32."""
        groups = self.codes.view(*self.scales.shape, GROUP).to(torch.float32)
        return torch.addcmul(self.minimums[..., None], groups, self.scales[..., None]).view(self.codes.shape)

    def map_rows(self, reorder: Callable[[Tensor], Tensor]) -> WeightGrid:
        """The same rows in another order."""
        return WeightGrid(reorder(self.codes), reorder(self.scales), reorder(self.minimums), self.num_bits)

    def columns(self, first: int, count: int) -> WeightGrid:
        """Some columns of all rows, whole groups."""
        if count == self.codes.shape[1]:
            return self
        groups = slice(first // GROUP, (first + count) // GROUP)
        codes = self.codes[:, first : first + count].contiguous()
        scales, minimums = self.scales[:, groups].contiguous(), self.minimums[:, groups].contiguous()
        return WeightGrid(codes, scales, minimums, self.num_bits)


def stacked(parts: Sequence[WeightGrid]) -> WeightGrid | None:
    """The rows of several matrices of one width, one after another; None where their codes are not of one size."""
    if len({part.num_bits for part in parts}) != 1:
        return None
    return WeightGrid(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.minimums for part in parts]),
        parts[0].num_bits,
    )


def grid_bits(format_name: str) -> int | None:
    """Bits of a code of a format of GGUF; None: it is no such grid."""
    return _FORMATS[format_name].num_bits if format_name in _FORMATS else None


def read_grid(format_name: str, raw: Tensor, num_columns: int) -> WeightGrid:
    """Takes blocks of a GGUF file apart.

    Args:
        format_name: GGUF's name of the format, one that is a grid.
        raw: [num_bytes] uint8 on the CPU, whole rows.
        num_columns: weights of a row, whole blocks.

    Returns:
        The grid. Damaged scales come out as NaN or infinity, for the caller to find.
    """
    layout = _FORMATS[format_name]
    codes, scales, minimums = layout.take_apart(raw.view(-1, layout.block_bytes))
    num_groups = num_columns // GROUP
    by_row = (codes.view(-1, num_columns), scales.view(-1, num_groups), minimums.view(-1, num_groups))
    return WeightGrid(*by_row, layout.num_bits)


_Parts = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Format:
    num_bits: int
    block_bytes: int
    take_apart: Callable[[Tensor], _Parts]


def _q4_0(blocks: Tensor) -> _Parts:
    scales = _halves(blocks[:, :2])  # [num_blocks, 1]
    return _nibbles(blocks[:, 2:]), scales, -8 * scales


def _q4_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q4_k(blocks: Tensor) -> _Parts:
    factors = _halves(blocks[:, :4])  # [num_blocks, 2]
    packed = blocks[:, 4:16].view(-1, 3, 4)
    low_scales, low_minimums, high = packed.unbind(1)  # [num_blocks, 4] each
    scales = torch.cat((low_scales & 0x3F, (high & 0x0F) | ((low_scales >> 2) & 0x30)), dim=1)  # [num_blocks, 8]
    minimums = torch.cat((low_minimums & 0x3F, (high >> 4) | ((low_minimums >> 2) & 0x30)), dim=1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 32))  # 32 bytes hold two groups: all low halves, then all high halves
    return codes, factors[:, :1] * scales, -(factors[:, 1:] * minimums)


def _q8_0(blocks: Tensor) -> _Parts:
    scales = _halves(blocks[:, :2])
    return blocks[:, 2:] ^ 0x80, scales, -128 * scales  # the sign's bit turned over is 128 added


def _halves(raw: Tensor) -> Tensor:
    """[num_blocks, n] float32 from [num_blocks, 2 * n] bytes."""
    return raw.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(raw: Tensor) -> Tensor:
    """[n, 2 * num_bytes] codes from [n, num_bytes]: all low halves, then all high halves."""
    return torch.cat((raw & 0x0F, raw >> 4), dim=1)


_FORMATS = {
    "Q4_0": _Format(4, 18, _q4_0),
    "Q4_1": _Format(4, 20, _q4_1),
    "Q4_K": _Format(4, 144, _q4_k),
    "Q8_0": _Format(8, 34, _q8_0),
}
