"""gpu_worker: what a decoder is: the numbers that its computation depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.gpu_worker.models.rotary import RotaryConfig


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Feed-forward parts of many experts, of which each token goes through a few.

    Attributes:
        num_experts: of a layer.
        num_chosen: experts that a token goes through, 1 to num_experts.
        intermediate_size: width of one expert.
        normalizes_shares: whether the shares of the chosen experts are made to add up to 1.
        in_layers: for each layer, whether it has experts; the others are dense.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalizes_shares: bool
    in_layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder, dense or with experts.

    Attributes:
        model_type: the family, a key of `registry.FAMILIES`.
        vocab_size: rows of the embedding and width of the logits; may exceed the tokenizer's entries.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward part of a dense layer.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of num_heads.
        head_dim: width of a head; num_heads * head_dim need not be hidden_size.
        has_qk_norm: whether queries and keys are normalised head by head.
        rms_norm_eps: added to the mean square in every norm.
        rotary: frequencies of the position embedding.
        windows: for each layer, how many tokens a token sees, itself included; None: all before it.
        max_position_embeddings: positions that the model was made for.
        tie_word_embeddings: whether the logits use the embedding's matrix.
        qkv_bias: whether the query, key and value projections add a bias.
        output_bias: whether attention's output projection does.
        mlp_bias: whether the feed-forward projections do.
        experts: the experts of layers that have such, None where all layers are dense.
        dtype: what the checkpoint says it is in, None where it does not say.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qk_norm: bool
    rms_norm_eps: float
    rotary: RotaryConfig
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    experts: ExpertConfig | None
    dtype: torch.dtype | None
