"""gpu_worker: what a decoder layer does between its products, each in one kernel."""

from __future__ import annotations

from torch import Tensor

from services.gpu_worker.kernels.rms_norm import add_norm, norm
from services.gpu_worker.kernels.swiglu import gated
from services.gpu_worker.models.operators import joined_norms


class FusedOperators:
    """The `Operators` for a CUDA device; the residual sum comes with the norm that reads it."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension: see `Operators.norm`."""
        return norm(x, weight, eps)

    def add_norm(self, hidden: Tensor, addend: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum, in the place of `hidden`, and its norm."""
        return hidden, add_norm(hidden, addend, weight, eps)

    def norm_heads(self, heads: Tensor, num_queries: int, weights: tuple[Tensor, Tensor], eps: float) -> Tensor:
        """See `Operators.norm_heads`."""
        return joined_norms(norm, heads, num_queries, weights, eps)

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [num_tokens, width] from [num_tokens, 2 * width], gate first."""
        return gated(gate_up)
