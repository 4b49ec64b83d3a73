"""gpu_worker: the weights of a feed-forward part that is made of experts.

As loaded, the experts of a layer are parts of two stacks, which a product over all of them reads at once. Where each
expert is laid out in a form of its own there are no stacks, and experts are multiplied one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from torch import Tensor

from services.gpu_worker.models.expert_steps import ExpertSteps, PlainExpertSteps
from services.gpu_worker.models.projection import Projection

P_co = TypeVar("P_co", bound=Projection, covariant=True)
Q = TypeVar("Q", bound=Projection)

# (x [num_rows, in_features], stack [num_experts, out_features, in_features], ends [num_experts] int32) -> [num_rows,
# out_features]. Rows [ends[e - 1], ends[e]) of x are multiplied by matrix e; the last end is num_rows. Nothing is read
# on the host.
GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Expert(Generic[P_co]):
    """One expert.

    Attributes:
        gate_up: [2 * width, hidden_size], gate rows, then up rows.
        down: [hidden_size, width].
    """

    gate_up: P_co
    down: P_co


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """The matrices of all experts of a layer.

    Attributes:
        gate_up: [num_experts, 2 * width, hidden_size].
        down: [num_experts, hidden_size, width].
        product: how they are multiplied; None: it is not known how to do that at once.
        steps: what is done around the products.
    """

    gate_up: Tensor
    down: Tensor
    product: GroupedProduct | None = None
    steps: ExpertSteps = field(default_factory=PlainExpertSteps)


@dataclass(frozen=True, slots=True)
class ExpertWeights(Generic[P_co]):
    """The experts of a layer, and what chooses among them.

    Attributes:
        router: [num_experts, hidden_size]; in no form of its own, because rounding it would choose other experts.
        experts: num_experts of them.
        stacks: the memory that the experts are parts of; None where they are not.
    """

    router: Tensor
    experts: tuple[Expert[P_co], ...]
    stacks: ExpertStacks | None

    def with_projections(self, change: Callable[[P_co], Q]) -> ExpertWeights[Q]:
        """The same with other projections, each made of the one that is there."""
        changed = (Expert(change(expert.gate_up), change(expert.down)) for expert in self.experts)
        return ExpertWeights(self.router, tuple(changed), None)

    def with_grouped_product(self, product: GroupedProduct, steps: ExpertSteps) -> ExpertWeights[P_co]:
        """The same, multiplied at once; unchanged where there are no stacks."""
        return self if self.stacks is None else replace(self, stacks=replace(self.stacks, product=product, steps=steps))

    @property
    def is_multiplied_at_once(self) -> bool:
        """Whether there is a product for all experts."""
        return self.stacks is not None and self.stacks.product is not None

    @property
    def num_bytes(self) -> int:
        """Memory of all of them."""
        return self.router.nbytes + sum(expert.gate_up.num_bytes + expert.down.num_bytes for expert in self.experts)
