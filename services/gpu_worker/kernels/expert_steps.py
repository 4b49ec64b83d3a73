"""gpu_worker: the steps of a layer of experts around its products, one kernel each: decode is many small launches else.

The plain ways are those of `models.expert_steps.PlainExpertSteps`.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from services.gpu_worker.kernels.jit import kernel, power_of_two
from services.gpu_worker.models.config import ExpertConfig
from services.gpu_worker.models.expert_steps import Groups, Routing

_MOST_COLUMNS = 1024
_MOST_CHOICES = 1024  # that a program looks at in one go


class FusedExpertSteps:
    """The `ExpertSteps` of a CUDA device."""

    def route(self, logits: Tensor, config: ExpertConfig) -> Routing:
        """See `ExpertSteps.route`."""
        shape = (logits.shape[0], config.num_chosen)
        experts = torch.empty(shape, dtype=torch.int64, device=logits.device)
        shares = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        _route[(logits.shape[0],)](
            logits,
            experts,
            shares,
            num_experts=config.num_experts,
            num_chosen=config.num_chosen,
            normalizes=config.normalizes_shares,
            expert_block=power_of_two(config.num_experts),
            choice_block=power_of_two(config.num_chosen),
            num_warps=1,
        )
        return Routing(experts, shares)

    def group(self, experts: Tensor, num_experts: int) -> Groups:
        """See `ExpertSteps.group`. Each expert's program goes through all choices: twice, they are few bytes."""
        num_choices = experts.numel()
        rows, places = torch.empty((2, num_choices), dtype=torch.int64, device=experts.device)
        ends = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
        _group[(num_experts,)](
            experts,
            rows,
            places,
            ends,
            num_choices,
            num_chosen=experts.shape[1],
            num_experts=num_experts,
            block=min(_MOST_CHOICES, power_of_two(num_choices)),
        )
        return Groups(rows, places, ends)

    def join(self, results: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        """See `ExpertSteps.join`."""
        num_tokens, num_chosen = shares.shape
        width = results.shape[1]
        joined = torch.empty((num_tokens, width), dtype=results.dtype, device=results.device)
        block = min(_MOST_COLUMNS, power_of_two(width))
        _join[(num_tokens, -(-width // block))](
            results, places, shares, joined, num_chosen=num_chosen, width=width, block=block
        )
        return joined


@kernel
def _route(
    logits: tl.tensor,
    experts: tl.tensor,
    shares: tl.tensor,
    num_experts: tl.constexpr,
    num_chosen: tl.constexpr,
    normalizes: tl.constexpr,
    expert_block: tl.constexpr,
    choice_block: tl.constexpr,
) -> None:
    """One token: its largest probability, then the largest of the others, and so on."""
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, expert_block)
    choices = tl.arange(0, choice_block)
    line = tl.load(logits + token * num_experts + numbers, mask=numbers < num_experts, other=float("-inf"))
    line = line.to(tl.float32)
    line = tl.exp(line - tl.max(line, 0))
    total = tl.sum(line, 0)
    left = line / total
    left = tl.where(left == left, left, 0.0)  # of a line that is not finite any experts will do, but there must be some
    chosen = tl.full([choice_block], 0.0, tl.float32)
    for choice in range(num_chosen):
        largest = tl.max(left, 0)
        expert = tl.argmax(left, 0)
        tl.store(experts + token * num_chosen + choice, expert.to(tl.int64))
        chosen = tl.where(choices == choice, largest, chosen)
        left = tl.where(numbers == expert, -1.0, left)
    if normalizes:
        chosen = chosen / tl.sum(chosen, 0)
    chosen = tl.where(total == total, chosen, total)  # and then their shares are not finite either
    tl.store(shares + token * num_chosen + choices, chosen.to(shares.dtype.element_ty), mask=choices < num_chosen)


@kernel
def _group(
    experts: tl.tensor,
    rows: tl.tensor,
    places: tl.tensor,
    ends: tl.tensor,
    num_choices: tl.tensor,
    num_chosen: tl.constexpr,
    num_experts: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One expert: how many choices fall before it, then the lines of its own."""
    expert = tl.program_id(0)
    offsets = tl.arange(0, block)
    num_before = tl.full([], 0, tl.int32)
    num_own = tl.full([], 0, tl.int32)
    for start in range(0, num_choices, block):
        at = start + offsets
        chosen = tl.load(experts + at, mask=at < num_choices, other=num_experts)
        num_before += tl.sum((chosen < expert).to(tl.int32), 0)
        num_own += tl.sum((chosen == expert).to(tl.int32), 0)
    tl.store(ends + expert, num_before + num_own)
    for start in range(0, num_choices, block):
        at = start + offsets
        is_own = tl.load(experts + at, mask=at < num_choices, other=num_experts) == expert
        own = is_own.to(tl.int32)
        place = num_before + tl.cumsum(own, 0) - 1
        tl.store(rows + place, (at // num_chosen).to(tl.int64), mask=is_own)
        tl.store(places + at, place.to(tl.int64), mask=is_own)
        num_before += tl.sum(own, 0)


@kernel
def _join(
    results: tl.tensor,
    places: tl.tensor,
    shares: tl.tensor,
    joined: tl.tensor,
    num_chosen: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_there = columns < width
    total = tl.full([block], 0.0, tl.float32)
    for choice in range(num_chosen):
        place = tl.load(places + token * num_chosen + choice)
        share = tl.load(shares + token * num_chosen + choice).to(tl.float32)
        total += share * tl.load(results + place * width + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(joined + token * width + columns, total.to(joined.dtype.element_ty), mask=is_there)
