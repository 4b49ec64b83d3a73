"""gpu_worker: the weights of a dense decoder, as the models read them.

Matrices that multiply the same input are kept as one: fewer, larger products.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; q = num_heads * head_dim, kv = num_kv_heads * head_dim. What a model lacks is None.

    Attributes:
        input_norm: [hidden_size].
        qkv: [q + kv + kv, hidden_size], rows of the query, key and value projections one after another.
        qkv_bias: [q + kv + kv].
        query_norm: [head_dim].
        key_norm: [head_dim].
        output: [hidden_size, q].
        output_bias: [hidden_size].
        mlp_norm: [hidden_size].
        gate_up: [2 * intermediate_size, hidden_size], gate rows, then up rows.
        gate_up_bias: [2 * intermediate_size].
        down: [hidden_size, intermediate_size].
        down_bias: [hidden_size].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model.

    Attributes:
        embedding: [vocab_size, hidden_size].
        layers: num_layers of them.
        final_norm: [hidden_size].
        head: [vocab_size, hidden_size]; the very same tensor as `embedding` where the two are tied.
        rotary_frequencies: [head_dim / 2] float32, from the configuration, not from the checkpoint.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    rotary_frequencies: Tensor
