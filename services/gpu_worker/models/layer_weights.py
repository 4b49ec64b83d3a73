"""gpu_worker: the weights of a decoder, as the models read them.

Matrices that multiply the same input are kept as one: fewer, larger products. A checkpoint is read into dense
projections; what runs may hold others, made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

from services.gpu_worker.models.expert_steps import ExpertSteps
from services.gpu_worker.models.expert_weights import ExpertWeights, GroupedProduct
from services.gpu_worker.models.projection import DenseProjection, Projection, rounds_from

P_co = TypeVar("P_co", bound=Projection, covariant=True)
Q = TypeVar("Q", bound=Projection)


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[P_co]):
    """One decoder layer; q = num_heads * head_dim, kv = num_kv_heads * head_dim. What a model lacks is None.

    Attributes:
        input_norm: [hidden_size].
        qkv: [q + kv + kv, hidden_size], rows of the query, key and value projections one after another.
        query_norm: [head_dim].
        key_norm: [head_dim].
        output: [hidden_size, q].
        mlp_norm: [hidden_size].
        gate_up: [2 * intermediate_size, hidden_size], gate rows, then up rows; None in a layer of experts.
        down: [hidden_size, intermediate_size]; likewise.
        experts: what a layer of experts has in their place.
    """

    input_norm: Tensor
    qkv: P_co
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: P_co
    mlp_norm: Tensor
    gate_up: P_co | None
    down: P_co | None
    experts: ExpertWeights[P_co] | None = None

    def with_projections(self, change: Callable[[P_co], Q]) -> LayerWeights[Q]:
        """The same layer with other projections, each made of the one that is there."""
        return LayerWeights(
            input_norm=self.input_norm,
            qkv=change(self.qkv),
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            output=change(self.output),
            mlp_norm=self.mlp_norm,
            gate_up=None if self.gate_up is None else change(self.gate_up),
            down=None if self.down is None else change(self.down),
            experts=None if self.experts is None else self.experts.with_projections(change),
        )

    @property
    def projections(self) -> tuple[P_co, ...]:
        """Those that every token goes through, in the order in which a step multiplies by them."""
        return tuple(each for each in (self.qkv, self.output, self.gate_up, self.down) if each is not None)

    @property
    def norm_bytes(self) -> int:
        """Memory of what is no projection."""
        norms = (self.input_norm, self.query_norm, self.key_norm, self.mlp_norm)
        return sum(norm.nbytes for norm in norms if norm is not None)

    @property
    def num_bytes(self) -> int:
        """Memory of all of them."""
        experts = 0 if self.experts is None else self.experts.num_bytes
        return self.norm_bytes + experts + sum(each.num_bytes for each in self.projections)


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[P_co]):
    """A whole model.

    Attributes:
        embedding: [vocab_size, hidden_size].
        layers: num_layers of them.
        final_norm: [hidden_size].
        head: [vocab_size, hidden_size]; as loaded, of the very same tensor as `embedding` where the two are tied.
        rotary_frequencies: [head_dim / 2] float32, from the configuration, not from the checkpoint.
    """

    embedding: Tensor
    layers: tuple[LayerWeights[P_co], ...]
    final_norm: Tensor
    head: P_co
    rotary_frequencies: Tensor

    def with_grouped_product(self, product: GroupedProduct, steps: ExpertSteps) -> DecoderWeights[P_co]:
        """The same model, with all experts of a layer multiplied at once where their matrices are stacked."""
        layers = (
            replace(layer, experts=layer.experts.with_grouped_product(product, steps)) if layer.experts else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def rounds_from(self) -> int | None:
        """New tokens of a step from which on the layers' products compute in bfloat16; None: never, or not all."""
        if any(layer.experts is not None for layer in self.layers):
            return None
        return rounds_from(projection for layer in self.layers for projection in layer.projections)

    @property
    def is_read_on_host(self) -> bool:
        """Whether the host must know which experts were chosen before it can go on."""
        return any(layer.experts is not None and not layer.experts.is_multiplied_at_once for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Memory of all of them; a head that is the embedding is counted once."""
        is_shared = isinstance(self.head, DenseProjection) and self.head.weight is self.embedding
        outside = self.embedding.nbytes + self.final_norm.nbytes + (0 if is_shared else self.head.num_bytes)
        return outside + sum(layer.num_bytes for layer in self.layers)
