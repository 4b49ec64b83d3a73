"""gpu_worker: the feed-forward part of a decoder layer, dense or of experts.

Experts are multiplied one after another, each with the tokens that chose it: the reference, and the way of CPUs, where
each expert is in a form of its own. On a CUDA device tokens are sorted by expert and all experts multiplied at once;
how many tokens each has stays on the device:

    chosen    t0: 2 0    t1: 0 3    t2: 2 3          two of four experts for each of three tokens
    by expert t0 t1 |  | t0 t2 | t1 t2               experts 0, 1, 2, 3
    ends         2   2       4       6
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.models.config import ExpertConfig, ModelConfig
from services.gpu_worker.models.expert_weights import Expert, ExpertStacks, ExpertWeights, GroupedProduct
from services.gpu_worker.models.layer_weights import LayerWeights
from services.gpu_worker.models.operators import Operators
from services.gpu_worker.models.projection import Projection


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token goes through.

    Attributes:
        experts: [num_tokens, num_chosen] int64, numbers of experts.
        shares: [num_tokens, num_chosen], what their results are multiplied by, in the model's dtype.
    """

    experts: Tensor
    shares: Tensor


def feed_forward(x: Tensor, layer: LayerWeights[Projection], config: ModelConfig, operators: Operators) -> Tensor:
    """The feed-forward part of a layer: [num_tokens, hidden_size] from the same."""
    if layer.experts is not None:
        assert config.experts is not None
        return _mixed(x, layer.experts, config.experts, operators)
    assert layer.gate_up is not None
    assert layer.down is not None
    return _gated(x, layer.gate_up, layer.down, operators)


def _gated(x: Tensor, gate_up: Projection, down: Projection, operators: Operators) -> Tensor:
    return down(operators.gated(gate_up(x)))


def _mixed(x: Tensor, weights: ExpertWeights[Projection], config: ExpertConfig, operators: Operators) -> Tensor:
    routing = route(x, weights.router, config)
    stacks = weights.stacks
    if stacks is None or stacks.product is None:
        return mixed_one_by_one(x, weights.experts, routing, operators)
    return mixed_at_once(x, stacks, stacks.product, routing, operators)


def route(x: Tensor, router: Tensor, config: ExpertConfig) -> Routing:
    """Chooses the likeliest experts of each token; the softmax is over all experts, in float32.

    Args:
        x: [num_tokens, hidden_size].
        router: [num_experts, hidden_size].
        config: how many are chosen, and whether their shares add up to 1.
    """
    probabilities = functional.linear(x, router).softmax(dim=-1, dtype=torch.float32)  # [num_tokens, num_experts]
    shares, experts = probabilities.topk(config.num_chosen, dim=-1)
    if config.normalizes_shares:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return Routing(experts, shares.to(x.dtype))


def mixed_one_by_one(
    x: Tensor, experts: tuple[Expert[Projection], ...], routing: Routing, operators: Operators
) -> Tensor:
    """The experts' results for each token, added up by its shares; one expert after another, the obvious way.

    Returns:
        [num_tokens, hidden_size].
    """
    total = torch.zeros_like(x)
    for number in sorted(set(routing.experts.flatten().tolist())):
        tokens, choices = (routing.experts == number).nonzero(as_tuple=True)
        result = _gated(x[tokens], experts[number].gate_up, experts[number].down, operators)
        total.index_add_(0, tokens, result * routing.shares[tokens, choices, None])
    return total


def mixed_at_once(
    x: Tensor, stacks: ExpertStacks, product: GroupedProduct, routing: Routing, operators: Operators
) -> Tensor:
    """The same as `mixed_one_by_one`, in a number of launches that depends on no number of tokens."""
    num_tokens, num_chosen = routing.experts.shape
    by_expert, order = routing.experts.flatten().sort(stable=True)  # [num_tokens * num_chosen] each
    numbers = torch.arange(len(stacks.gate_up), device=x.device)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)  # [num_experts]
    rows = x.index_select(0, order.div(num_chosen, rounding_mode="floor"))
    results = product(operators.gated(product(rows, stacks.gate_up, ends)), stacks.down, ends)
    by_token = torch.empty_like(results).index_copy_(0, order, results).view(num_tokens, num_chosen, -1)
    return (by_token * routing.shares[..., None]).sum(dim=1)
