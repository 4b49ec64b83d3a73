"""gpu_worker: which tensors a checkpoint of a model must hold, and where each one goes.

Names and shapes are those of a Hugging Face checkpoint. Everything follows from the configuration, so that a file can
be checked before any of its data is read: lay the model out on the `meta` device first, where tensors have shapes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.gpu_worker.models.config import ExpertConfig, ModelConfig
from services.gpu_worker.models.expert_weights import Expert, ExpertStacks, ExpertWeights
from services.gpu_worker.models.layer_weights import DecoderWeights, LayerWeights
from services.gpu_worker.models.projection import DenseProjection


@dataclass(frozen=True, slots=True)
class Placement:
    """A tensor of the checkpoint and its place: `target` is a view into the model's weights, of the tensor's shape."""

    name: str
    target: Tensor


def allocate_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights[DenseProjection]:
    """The weights of a model, not yet filled, beside the constants that follow from its configuration.

    Args:
        config: the model.
        dtype: of all weights.
        device: where they live; `meta` costs nothing.
    """
    outside = allocate_outside(config, dtype, device)
    return replace(
        outside, layers=tuple(allocate_layer(config, dtype, device, index) for index in range(config.num_layers))
    )


def allocate_outside(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights[DenseProjection]:
    """What is no layer's: a model without layers; see `allocate_weights`."""
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = torch.empty(vocabulary, dtype=dtype, device=device)
    head = embedding if config.tie_word_embeddings else torch.empty(vocabulary, dtype=dtype, device=device)
    frequencies = torch.tensor(config.rotary.inverse_frequencies, dtype=torch.float32, device=device)
    final_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
    return DecoderWeights(embedding, (), final_norm, DenseProjection(head), frequencies)


def allocate_layer(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, index: int
) -> LayerWeights[DenseProjection]:
    """One layer, by its number; see `allocate_weights`."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def projection(rows: int, columns: int, has_bias: bool) -> DenseProjection:
        return DenseProjection(empty(rows, columns), empty(rows) if has_bias else None)

    hidden, middle = config.hidden_size, config.intermediate_size
    query, qkv = _query_width(config), _query_width(config) + 2 * _kv_width(config)
    has_experts = config.experts is not None and config.experts.in_layers[index]
    return LayerWeights(
        input_norm=empty(hidden),
        qkv=projection(qkv, hidden, config.qkv_bias),
        query_norm=empty(config.head_dim) if config.has_qk_norm else None,
        key_norm=empty(config.head_dim) if config.has_qk_norm else None,
        output=projection(hidden, query, config.output_bias),
        mlp_norm=empty(hidden),
        gate_up=None if has_experts else projection(2 * middle, hidden, config.mlp_bias),
        down=None if has_experts else projection(hidden, middle, config.mlp_bias),
        experts=_allocate_experts(config.experts, hidden, empty) if config.experts and has_experts else None,
    )


def _allocate_experts(
    config: ExpertConfig, hidden_size: int, empty: Callable[..., Tensor]
) -> ExpertWeights[DenseProjection]:
    """Each expert is a part of the layer's stacks."""
    stacks = ExpertStacks(
        gate_up=empty(config.num_experts, 2 * config.intermediate_size, hidden_size),
        down=empty(config.num_experts, hidden_size, config.intermediate_size),
    )
    experts = (
        Expert(DenseProjection(gate_up), DenseProjection(down))
        for gate_up, down in zip(stacks.gate_up, stacks.down, strict=True)
    )
    return ExpertWeights(empty(config.num_experts, hidden_size), tuple(experts), stacks)


def placements(config: ModelConfig, weights: DecoderWeights[DenseProjection]) -> Iterator[Placement]:
    """Every tensor that the checkpoint must hold, once."""
    yield from outside_placements(config, weights)
    for index, layer in enumerate(weights.layers):
        yield from layer_placements(config, layer, index)


def outside_placements(config: ModelConfig, weights: DecoderWeights[DenseProjection]) -> Iterator[Placement]:
    """Those that are no layer's."""
    yield Placement("model.embed_tokens.weight", weights.embedding)
    yield Placement("model.norm.weight", weights.final_norm)
    if not config.tie_word_embeddings:
        yield Placement("lm_head.weight", weights.head.weight)


def layer_placements(config: ModelConfig, layer: LayerWeights[DenseProjection], index: int) -> Iterator[Placement]:
    """Those of a layer, by its number."""
    prefix = f"model.layers.{index}"
    query, kv = _query_width(config), _kv_width(config)
    qkv_parts = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    yield Placement(f"{prefix}.input_layernorm.weight", layer.input_norm)
    yield from _fused(attention, "weight", qkv_parts, layer.qkv.weight)
    yield from _fused(attention, "bias", qkv_parts, layer.qkv.bias)
    yield from _optional(f"{attention}.q_norm.weight", layer.query_norm)
    yield from _optional(f"{attention}.k_norm.weight", layer.key_norm)
    yield Placement(f"{attention}.o_proj.weight", layer.output.weight)
    yield from _optional(f"{attention}.o_proj.bias", layer.output.bias)
    yield Placement(f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm)
    if layer.gate_up is not None and layer.down is not None:
        yield from _gated_placements(mlp, layer.gate_up, layer.down)
    if layer.experts is not None:
        yield Placement(f"{mlp}.gate.weight", layer.experts.router)
        for number, expert in enumerate(layer.experts.experts):
            yield from _gated_placements(f"{mlp}.experts.{number}", expert.gate_up, expert.down)


def _gated_placements(prefix: str, gate_up: DenseProjection, down: DenseProjection) -> Iterator[Placement]:
    """Those of a dense feed-forward part, or of one expert."""
    width = gate_up.weight.shape[0] // 2
    parts = (("gate_proj", width), ("up_proj", width))
    yield from _fused(prefix, "weight", parts, gate_up.weight)
    yield from _fused(prefix, "bias", parts, gate_up.bias)
    yield Placement(f"{prefix}.down_proj.weight", down.weight)
    yield from _optional(f"{prefix}.down_proj.bias", down.bias)


def _fused(prefix: str, kind: str, parts: tuple[tuple[str, int], ...], whole: Tensor | None) -> Iterator[Placement]:
    """Parts of a fused matrix or bias: consecutive rows of it."""
    if whole is None:
        return
    start = 0
    for name, num_rows in parts:
        yield Placement(f"{prefix}.{name}.{kind}", whole[start : start + num_rows])
        start += num_rows


def _optional(name: str, target: Tensor | None) -> Iterator[Placement]:
    if target is not None:
        yield Placement(name, target)


def _query_width(config: ModelConfig) -> int:
    return config.num_heads * config.head_dim


def _kv_width(config: ModelConfig) -> int:
    return config.num_kv_heads * config.head_dim
