"""gpu_worker: what a dense decoder is: the numbers that its computation depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.gpu_worker.models.rotary import RotaryConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder.

    Attributes:
        model_type: the family, a key of `registry.FAMILIES`.
        vocab_size: rows of the embedding and width of the logits; may exceed the tokenizer's entries.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward part.
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
    dtype: torch.dtype | None
