"""gpu_worker: products in 8-bit numbers (`fp8`), for CUDA devices that multiply them.

Weights have a scale for each row of the matrix, found once; inputs one for each token, found at every call: so the
result of a token depends on no other. Sums are in float32, results in bfloat16.

    weight[o, i] = codes[o, i] * scales[o]        x[t, i] ~ rounded[t, i] * scale[t], scale[t] = max |x[t]| / 448
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from services.gpu_worker.fp8 import E4M3, to_fp8
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.projection import DenseProjection, Projection
from services.gpu_worker.weight_grid import WeightGrid

FP8_SIDES = 16
"""Numbers of rows and columns of a matrix must be multiples of it."""

LEAST_MAXIMUM = 1e-12
"""What the largest number of a row of zeros is taken to be."""

# x [num_tokens, width] -> (codes of x in E4M3, scales [num_tokens, 1] float32)
RoundRows = Callable[[Tensor], tuple[Tensor, Tensor]]


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """A `RoundRows`: the plain way. A row's largest number becomes the largest there is."""
    wide = x.to(torch.float32)
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST_MAXIMUM) / torch.finfo(E4M3).max
    return to_fp8(wide / scales, E4M3), scales


class Fp8Projection:
    """A `Projection` over 8-bit weights; inputs and results are in bfloat16.

    Args:
        weight: [out_features, in_features], both multiples of 16.
        bias: [out_features] or None.
        rounds: how inputs are rounded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rounds: RoundRows) -> None:
        self._codes, scales = round_rows(weight)
        self._scales = scales.view(1, -1)
        self._bias = bias
        self._rounds = rounds
        self.num_bytes = self._codes.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection.__call__`."""
        codes, scales = self._rounds(x)
        product: Tensor = torch._scaled_mm(
            codes, self._codes.t(), scale_a=scales, scale_b=self._scales, out_dtype=torch.bfloat16
        )
        return product if self._bias is None else product.add_(self._bias)


class Fp8Forms:
    """The `Forms` of a model whose layers are in 8 bits. The head stays as it is: its errors would be the logits'."""

    def __init__(self, config: ModelConfig, rounds: RoundRows, pump: Callable[[], None] = lambda: None) -> None:
        """Takes the model, how inputs are rounded, and what says for each matrix that this process lives."""
        self._head_shape = (config.vocab_size, config.hidden_size)
        self._is_tied = config.tie_word_embeddings
        self._rounds = rounds
        self._pump = pump
        self._counts: Counter[str] = Counter()

    def reads_grid(self, num_bits: int) -> bool:
        """See `Forms.reads_grid`: whatever the file holds is rounded anew."""
        return False

    @property
    def description(self) -> str:
        """What was done, in a few words."""
        return ", ".join(f"{count} matrices {name}" for name, count in self._counts.most_common())

    def expect(self, num_weights: int, grid_bits: int | None) -> int:
        """See `Forms.expect`; a head that is the embedding is counted with that."""
        if num_weights == self._head_shape[0] * self._head_shape[1]:
            return 0 if self._is_tied else 2 * num_weights
        return num_weights + 4 * num_weights // self._head_shape[1]

    def settle(self) -> None:
        """See `Forms.settle`: nothing is left open."""

    def of_all(self, weights: DecoderWeights[DenseProjection]) -> DecoderWeights[Projection]:
        """The layers of a whole model in their forms."""
        layers = (layer.with_projections(lambda dense: self.lay_out(dense, None)) for layer in weights.layers)
        head: Projection = weights.head
        return DecoderWeights(weights.embedding, tuple(layers), weights.final_norm, head, weights.rotary_frequencies)

    def lay_out(self, dense: DenseProjection, grid: WeightGrid | None) -> Projection:
        """See `Forms.lay_out`."""
        self._pump()
        num_rows, num_columns = dense.weight.shape
        is_head = (num_rows, num_columns) == self._head_shape
        if is_head or num_rows % FP8_SIDES or num_columns % FP8_SIDES:
            self._counts["plain"] += 1
            return dense
        self._counts["in 8 bits"] += 1
        return Fp8Projection(dense.weight, dense.bias, self._rounds)
