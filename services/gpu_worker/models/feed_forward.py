"""gpu_worker: the feed-forward part of a decoder layer, dense or of experts.

Experts are multiplied one after another, each with the tokens that chose it: the reference, and the way of CPUs, where
each expert is in a form of its own. On a CUDA device tokens are sorted by expert and all experts multiplied at once
(`expert_steps`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.models.config import ExpertConfig, ModelConfig
from services.gpu_worker.models.expert_steps import PlainExpertSteps, Routing
from services.gpu_worker.models.expert_weights import Expert, ExpertStacks, ExpertWeights, GroupedProduct
from services.gpu_worker.models.layer_weights import LayerWeights
from services.gpu_worker.models.operators import Operators
from services.gpu_worker.models.projection import Projection


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
    stacks = weights.stacks
    if stacks is None or stacks.product is None:
        return mixed_one_by_one(x, weights.experts, route(x, weights.router, config), operators)
    routing = stacks.steps.route(functional.linear(x, weights.router), config)
    return mixed_at_once(x, stacks, stacks.product, routing, operators)


def route(x: Tensor, router: Tensor, config: ExpertConfig) -> Routing:
    """The experts of tokens [num_tokens, hidden_size], by a router [num_experts, hidden_size], the plain way."""
    return PlainExpertSteps().route(functional.linear(x, router), config)


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
    groups = stacks.steps.group(routing.experts, len(stacks.gate_up))
    rows = x.index_select(0, groups.rows)  # [num_tokens * num_chosen, hidden_size]
    inner = operators.gated(product(rows, stacks.gate_up, groups.ends))
    return stacks.steps.join(product(inner, stacks.down, groups.ends), groups.places, routing.shares)
