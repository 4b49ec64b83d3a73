"""gpu_worker: matrices whose weights lie on a grid of 16 values for each 32 neighbours of a row.

The 4-bit formats of GGUF files are such grids: weight = code * scale + minimum. Kept as codes, a matrix takes an eighth
of its float32 form, and a product of few rows, which waits for memory, so much less time.

    Q4_0    block of 32: scale f16, 16 bytes of codes; minimum = -8 * scale
    Q4_1    block of 32: scale f16, minimum f16, 16 bytes of codes
    Q4_K    block of 256: two f16 that scale 8 scales and 8 minimums of 6 bits, 4 times 32 bytes of codes

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
class FourBitGrid:
    """A matrix of [num_rows, num_columns].

    Attributes:
        codes: [num_rows, num_columns] uint8, 0 to 15.
        scales: [num_rows, num_columns / GROUP] float32.
        minimums: likewise.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor

    def values(self) -> Tensor:
        """The weights: [num_rows, num_columns] float32."""
        groups = self.codes.view(*self.scales.shape, GROUP).to(torch.float32)
        return torch.addcmul(self.minimums[..., None], groups, self.scales[..., None]).view(self.codes.shape)

    def map_rows(self, reorder: Callable[[Tensor], Tensor]) -> FourBitGrid:
        """The same rows in another order."""
        return FourBitGrid(reorder(self.codes), reorder(self.scales), reorder(self.minimums))


def stacked(parts: Sequence[FourBitGrid]) -> FourBitGrid:
    """The rows of several matrices of one width, one after another."""
    return FourBitGrid(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.minimums for part in parts]),
    )


def has_grid(format_name: str) -> bool:
    """Whether a format of GGUF is such a grid."""
    return format_name in _FORMATS


def read_grid(format_name: str, raw: Tensor, num_columns: int) -> FourBitGrid:
    """Takes blocks of a GGUF file apart.

    Args:
        format_name: GGUF's name of the format, one that `has_grid`.
        raw: [num_bytes] uint8 on the CPU, whole rows.
        num_columns: weights of a row, whole blocks.

    Returns:
        The grid. Damaged scales come out as NaN or infinity, for the caller to find.
    """
    block_bytes, take_apart = _FORMATS[format_name]
    codes, scales, minimums = take_apart(raw.view(-1, block_bytes))
    num_groups = num_columns // GROUP
    return FourBitGrid(codes.view(-1, num_columns), scales.view(-1, num_groups), minimums.view(-1, num_groups))


_Parts = tuple[Tensor, Tensor, Tensor]


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


def _halves(raw: Tensor) -> Tensor:
    """[num_blocks, n] float32 from [num_blocks, 2 * n] bytes."""
    return raw.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(raw: Tensor) -> Tensor:
    """[n, 2 * num_bytes] codes from [n, num_bytes]: all low halves, then all high halves."""
    return torch.cat((raw & 0x0F, raw >> 4), dim=1)


_FORMATS: dict[str, tuple[int, Callable[[Tensor], _Parts]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
}
