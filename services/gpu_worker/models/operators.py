"""gpu_worker: the small operators of a decoder layer, those that are neither a product nor attention.

They are a seam: a device on which many small calls cost more than what they compute has them fused. The plain ones here
are the reference, and what every device can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Operators(Protocol):
    """What a decoder layer does between its products."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension: [..., width] from [..., width] and weight [width]."""

    def add_norm(self, hidden: Tensor, addend: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum of two [num_tokens, width], which may take the place of `hidden`, and its norm.

        The sum is in the dtype of `hidden`, the norm in that of the addend.
        """

    def norm_heads(self, heads: Tensor, num_queries: int, weights: tuple[Tensor, Tensor], eps: float) -> Tensor:
        """Norms of heads [num_tokens, heads, width], the first `num_queries` with the first weight: of that shape."""

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up (arXiv 2002.05202): [num_tokens, width] from [num_tokens, 2 * width], gate first."""


def joined_norms(
    norm: Callable[[Tensor, Tensor, float], Tensor],
    heads: Tensor,
    num_queries: int,
    weights: tuple[Tensor, Tensor],
    eps: float,
) -> Tensor:
    """`Operators.norm_heads` by a norm for each part."""
    return torch.cat((norm(heads[:, :num_queries], weights[0], eps), norm(heads[:, num_queries:], weights[1], eps)), 1)


class PlainOperators:
    """The `Operators` that the others must agree with: torch's own, one by one."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operators.norm` (arXiv 1910.07467).

        Half precisions are normalised in float32 and rounded before the weight multiplies them, as the models were
        trained.
        """
        if x.dtype == torch.float32:
            return functional.rms_norm(x, weight.shape, weight, eps)
        normalised = functional.rms_norm(x.to(torch.float32), weight.shape, None, eps)
        return normalised.to(x.dtype) * weight

    def add_norm(self, hidden: Tensor, addend: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Operators.add_norm`."""
        total = hidden + addend
        return total, self.norm(total, weight, eps).to(addend.dtype)

    def norm_heads(self, heads: Tensor, num_queries: int, weights: tuple[Tensor, Tensor], eps: float) -> Tensor:
        """See `Operators.norm_heads`."""
        return joined_norms(self.norm, heads, num_queries, weights, eps)

    def gated(self, gate_up: Tensor) -> Tensor:
        """See `Operators.gated`."""
        gate, up = gate_up.chunk(2, dim=-1)  # [num_tokens, width] each
        return functional.silu(gate).mul_(up)
