"""gpu_worker: products in bfloat16 on a processor's registers for tiles of matrices (see `cpu_loops.tile_registers`).

What oneDNN computes too, for packed bfloat16. A loop of our own is called for less, which is what counts where rows are
few, and it can be recorded with the others of a step.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from services.gpu_worker.cpu_loops import loops_problem

FEW_ROWS = 64
"""Up to so many rows the loop itself rounds what it is given, and results are in float32."""

_TILE, _DEPTH = 16, 32
_PAIR = 2  # inputs that lie side by side


def has_tile_loop() -> bool:
    """Whether loops can run here, and this processor has registers for tiles."""
    if loops_problem():
        return False
    from services.gpu_worker.cpu_loops.tile_registers import has_tiles  # only where there is numba

    return has_tiles()


def fits_tile_loop(weight: Tensor) -> bool:
    """Whether the loop can take a matrix here: one of whole tiles, [16 n, 32 m]."""
    return weight.shape[0] % _TILE == 0 and weight.shape[1] % _DEPTH == 0 and has_tile_loop()


class TileProjection:
    """A `Projection` over weights in bfloat16; inputs and results are in float32 or bfloat16, sums in float32.

    Args:
        weight: [out_features, in_features], on the CPU, one that `fits_tile_loop`.
        bias: [out_features] float32 or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        assert fits_tile_loop(weight)  # the registers must have been asked for
        from services.gpu_worker.cpu_loops.team import TEAM  # only where there is numba
        from services.gpu_worker.cpu_loops.tile_loop import BLOCK_BYTES, TILE_PRODUCT
        from services.gpu_worker.cpu_loops.tile_registers import register_shapes

        assert TEAM is not None
        self._team, self._loop, self._block_bytes = TEAM, TILE_PRODUCT, BLOCK_BYTES
        self._out_features, self._in_features = weight.shape
        self._weights = _in_tiles(weight.to(torch.bfloat16))
        self._bias = None if bias is None else bias.contiguous()
        self._shapes = register_shapes()
        self.num_bytes = self._weights.nbytes + (0 if bias is None else bias.nbytes)

    @property
    def rounds_from(self) -> int | None:
        """See `RoundsInputs`; fewer rows are not worth what it does to their numbers."""
        return FEW_ROWS + 1

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection.__call__`."""
        num_rows = x.shape[0]
        out = torch.empty(num_rows, self._out_features, dtype=x.dtype)
        x = (x if num_rows <= FEW_ROWS else x.to(torch.bfloat16)).contiguous()
        room = 0 if x.dtype == torch.bfloat16 else 2 * num_rows * self._in_features
        numbers = (
            x.data_ptr(), self._weights.data_ptr(), out.data_ptr(), 0 if self._bias is None else self._bias.data_ptr(),
            self._team.scratch(torch.get_num_threads() * (self._block_bytes + room)), self._shapes.data_ptr(),
            num_rows, self._in_features // _DEPTH, self._out_features // _TILE,
            8 * x.dtype.itemsize, 8 * out.dtype.itemsize,
        )  # fmt: skip
        self._team.run(self._loop, array("q", numbers), True)
        return out


def _in_tiles(weight: Tensor) -> Tensor:
    """[tiles, depths, 16, 16, 2]: of each tile of columns and 32 inputs, pair by pair, both numbers of each column."""
    rows, columns = weight.shape
    tiles = weight.view(rows // _TILE, _TILE, columns // _DEPTH, _DEPTH // _PAIR, _PAIR)
    return tiles.permute(0, 2, 3, 1, 4).contiguous()
