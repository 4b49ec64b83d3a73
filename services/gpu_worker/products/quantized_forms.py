"""gpu_worker: `--quantization`: matrices are rounded as they are laid out, and what that did to them is told.

    int8    all of them
    int4    those of the layers; the head is kept in 8 bits, where an error goes straight into the logits

What the file already holds in as few bits is kept as it is. A matrix whose shape the operator cannot take is laid out
as without quantization.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.projection import DenseProjection, Projection
from services.gpu_worker.products.eight_bit import EightBitProjection, has_eight_bit_products
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.products.four_bit import fits_four_bit
from services.gpu_worker.products.grid import fits_grid_loop, has_grid_loop
from services.gpu_worker.products.rounding import (
    rounded_to_eight_bits,
    rounded_to_four_bits,
    rounded_to_groups_of_eight_bits,
)
from services.gpu_worker.weight_grid import GROUP, WeightGrid

_BYTES_BESIDE = 32  # for so many weights about one byte of scales, in 8 bits


class QuantizedForms:
    """The `Forms` of a model whose weights are rounded at load."""

    def __init__(
        self, forms: CpuForms, config: ModelConfig, num_bits: int, pump: Callable[[], None] = lambda: None
    ) -> None:
        """Starts counting.

        Args:
            forms: what becomes of grids, and of matrices that are not rounded.
            config: of the model.
            num_bits: to round to, 8 or 4.
            pump: see `CpuForms`.
        """
        self._forms = forms
        self._head_shape = (config.vocab_size, config.hidden_size)
        self._pump = pump
        self._num_bits = num_bits
        self._num_rounded = {4: 0, 8: 0}
        self._num_left = 0
        self._squares = 0.0
        self._squared_errors = 0.0

    def reads_grid(self, num_bits: int) -> bool:
        """See `Forms.reads_grid`."""
        return self._forms.reads_grid(num_bits)

    def settle(self) -> None:
        """See `Forms.settle`."""
        self._forms.settle()

    @property
    def description(self) -> str:
        """What was done, in a few words."""
        rounded = [f"{count} matrices rounded to int{bits}" for bits, count in self._num_rounded.items() if count]
        left = [f"{self._num_left} left as they were: no operator here takes their shape"] if self._num_left else []
        if not rounded and not left:
            left = ["nothing to round: the file holds all matrices in as few bits"]
        cost = [f"weights {100 * self.error:.2f} % off on average"] if rounded else []
        return ", ".join(part for part in (*rounded, *left, *cost, self._forms.description) if part)

    @property
    def error(self) -> float:
        """Root mean square of what rounding changed in the weights that were rounded, as a share of theirs."""
        return float((self._squared_errors / self._squares) ** 0.5) if self._squares else 0.0

    def expect(self, num_weights: int, grid_bits: int | None) -> int:
        """See `Forms.expect`."""
        is_head = num_weights == self._head_shape[0] * self._head_shape[1]
        if grid_bits is not None and (is_head or grid_bits <= self._num_bits):
            return self._forms.expect(num_weights, grid_bits)
        if self._num_bits == 4 and not is_head:
            return self._forms.expect(num_weights, 4)
        if has_grid_loop():
            return self._forms.expect(num_weights, 8)
        if not has_eight_bit_products():
            return self._forms.expect(num_weights, None)
        return num_weights + num_weights // _BYTES_BESIDE

    def lay_out(self, dense: DenseProjection, grid: WeightGrid | None) -> Projection:
        """See `Forms.lay_out`."""
        is_head = tuple(dense.weight.shape) == self._head_shape
        if grid is not None and (is_head or grid.num_bits <= self._num_bits):
            return self._forms.lay_out(dense, grid)
        if self._num_bits == 8 or is_head:
            return self._in_eight_bits(dense)
        return self._in_four_bits(dense)

    def _in_four_bits(self, dense: DenseProjection) -> Projection:
        if dense.weight.shape[1] % GROUP:
            return self._left(dense)
        grid = rounded_to_four_bits(dense.weight)
        if not fits_grid_loop(grid) and not fits_four_bit(grid):
            return self._left(dense)
        return self._on_grid(4, dense, grid)

    def _on_grid(self, num_bits: int, dense: DenseProjection, grid: WeightGrid) -> Projection:
        values = grid.values()
        self._count(num_bits, dense.weight, values)
        return self._forms.lay_out(DenseProjection(values, dense.bias), grid)

    def _in_eight_bits(self, dense: DenseProjection) -> Projection:
        if dense.weight.shape[1] % GROUP == 0 and fits_grid_loop(grid := rounded_to_groups_of_eight_bits(dense.weight)):
            return self._on_grid(8, dense, grid)
        if not has_eight_bit_products():
            return self._left(dense)
        codes, scales = rounded_to_eight_bits(dense.weight)
        self._count(8, dense.weight, codes * scales[:, None])
        self._pump()
        return EightBitProjection(codes, scales, dense.bias)

    def _left(self, dense: DenseProjection) -> Projection:
        self._num_left += 1
        return self._forms.lay_out(dense, None)

    def _count(self, num_bits: int, weight: Tensor, rounded: Tensor) -> None:
        self._num_rounded[num_bits] += 1
        self._squares += float(torch.linalg.vector_norm(weight)) ** 2
        self._squared_errors += float(torch.linalg.vector_norm(rounded - weight)) ** 2
