"""gpu_worker: what a layer of experts does besides its products: choose experts, sort tokens by them, join results.

    chosen    t0: 2 0    t1: 0 3    t2: 2 3          two of four experts for each of three tokens
    by expert t0 t1 |  | t0 t2 | t1 t2               lines of experts 0, 1, 2, 3
    ends         2   2       4       6
    places    t0: 2 0    t1: 1 4    t2: 3 5          the line of each choice

How many tokens each expert has stays on the device. The plain steps here are torch's operations, and the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.gpu_worker.models.config import ExpertConfig


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token goes through.

    Attributes:
        experts: [num_tokens, num_chosen] int64, numbers of experts.
        shares: [num_tokens, num_chosen], what their results are multiplied by, in the model's dtype.
    """

    experts: Tensor
    shares: Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """The choices of all tokens as lines, sorted by expert, those of one expert in the order of tokens.

    Attributes:
        rows: [num_tokens * num_chosen] int64, the token of each line.
        places: [num_tokens * num_chosen] int64, the line of each choice, choices of a token side by side.
        ends: [num_experts] int32, one past the last line of each expert.
    """

    rows: Tensor
    places: Tensor
    ends: Tensor


class ExpertSteps(Protocol):
    """The steps of a layer of experts around its products. None of them reads anything on the host."""

    def route(self, logits: Tensor, config: ExpertConfig) -> Routing:
        """Chooses the likeliest experts of each token; the softmax is over all experts, in float32.

        Args:
            logits: [num_tokens, num_experts].
            config: how many are chosen, and whether their shares add up to 1.
        """

    def group(self, experts: Tensor, num_experts: int) -> Groups:
        """Sorts choices, [num_tokens, num_chosen] int64, by expert."""

    def join(self, results: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        """Adds up the results of each token by its shares.

        Args:
            results: [num_tokens * num_chosen, width], lines.
            places: see `Groups`.
            shares: see `Routing`.

        Returns:
            [num_tokens, width].
        """


class PlainExpertSteps:
    """The `ExpertSteps` that others must agree with."""

    def route(self, logits: Tensor, config: ExpertConfig) -> Routing:
        """See `ExpertSteps.route`."""
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)  # [num_tokens, num_experts]
        shares, experts = probabilities.topk(config.num_chosen, dim=-1)
        if config.normalizes_shares:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return Routing(experts, shares.to(logits.dtype))

    def group(self, experts: Tensor, num_experts: int) -> Groups:
        """See `ExpertSteps.group`."""
        by_expert, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(num_experts, device=experts.device)
        ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
        places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        return Groups(order.div(experts.shape[1], rounding_mode="floor"), places, ends)

    def join(self, results: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        """See `ExpertSteps.join`."""
        by_token = results.index_select(0, places).view(*shares.shape, -1)  # [num_tokens, num_chosen, width]
        return (by_token * shares[..., None]).sum(dim=1)
