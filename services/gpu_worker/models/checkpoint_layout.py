"""gpu_worker: which tensors a checkpoint of a model must hold, and where each one goes.

Names and shapes are those of a Hugging Face checkpoint. Everything follows from the configuration, so that a file can
be checked before any of its data is read: lay the model out on the `meta` device first, where tensors have shapes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.layer_weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class Placement:
    """A tensor of the checkpoint and its place: `target` is a view into the model's weights, of the tensor's shape."""

    name: str
    target: Tensor


def allocate_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """The weights of a model, not yet filled, beside the constants that follow from its configuration.

    Args:
        config: the model.
        dtype: of all weights.
        device: where they live; `meta` costs nothing.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def empty_if(wanted: bool, *shape: int) -> Tensor | None:
        return empty(*shape) if wanted else None

    hidden, middle = config.hidden_size, config.intermediate_size
    query, qkv = _query_width(config), _query_width(config) + 2 * _kv_width(config)
    layers = tuple(
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(qkv, hidden),
            qkv_bias=empty_if(config.qkv_bias, qkv),
            query_norm=empty_if(config.has_qk_norm, config.head_dim),
            key_norm=empty_if(config.has_qk_norm, config.head_dim),
            output=empty(hidden, query),
            output_bias=empty_if(config.output_bias, hidden),
            mlp_norm=empty(hidden),
            gate_up=empty(2 * middle, hidden),
            gate_up_bias=empty_if(config.mlp_bias, 2 * middle),
            down=empty(hidden, middle),
            down_bias=empty_if(config.mlp_bias, hidden),
        )
        for _ in range(config.num_layers)
    )
    embedding = empty(config.vocab_size, hidden)
    head = embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden)
    frequencies = torch.tensor(config.rotary.inverse_frequencies, dtype=torch.float32, device=device)
    return DecoderWeights(embedding, layers, empty(hidden), head, frequencies)


def placements(config: ModelConfig, weights: DecoderWeights) -> Iterator[Placement]:
    """Every tensor that the checkpoint must hold, once, in the order of a forward pass."""
    yield Placement("model.embed_tokens.weight", weights.embedding)
    for index, layer in enumerate(weights.layers):
        yield from _layer_placements(config, layer, f"model.layers.{index}")
    yield Placement("model.norm.weight", weights.final_norm)
    if not config.tie_word_embeddings:
        yield Placement("lm_head.weight", weights.head)


def _layer_placements(config: ModelConfig, layer: LayerWeights, prefix: str) -> Iterator[Placement]:
    query, kv, middle = _query_width(config), _kv_width(config), config.intermediate_size
    qkv_parts = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
    gate_up_parts = (("gate_proj", middle), ("up_proj", middle))
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    yield Placement(f"{prefix}.input_layernorm.weight", layer.input_norm)
    yield from _fused(attention, "weight", qkv_parts, layer.qkv)
    yield from _fused(attention, "bias", qkv_parts, layer.qkv_bias)
    yield from _optional(f"{attention}.q_norm.weight", layer.query_norm)
    yield from _optional(f"{attention}.k_norm.weight", layer.key_norm)
    yield Placement(f"{attention}.o_proj.weight", layer.output)
    yield from _optional(f"{attention}.o_proj.bias", layer.output_bias)
    yield Placement(f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm)
    yield from _fused(mlp, "weight", gate_up_parts, layer.gate_up)
    yield from _fused(mlp, "bias", gate_up_parts, layer.gate_up_bias)
    yield Placement(f"{mlp}.down_proj.weight", layer.down)
    yield from _optional(f"{mlp}.down_proj.bias", layer.down_bias)


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
