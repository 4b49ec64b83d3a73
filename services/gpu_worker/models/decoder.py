"""gpu_worker: one forward pass of a dense decoder: what all families do alike.

Sums are kept in the model's dtype, as the models were trained; logits are float32. The final norm and the head are
apart from the layers, because few tokens need them: those that sample, and the prompt's where somebody asks for more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.attention.backend import StepAttention
from services.gpu_worker.models.blocks import feed_forward, rms_norm
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.registry import FAMILIES
from services.gpu_worker.models.rotary import rotary_cos_sin
from services.gpu_worker.step_inputs import StepInputs


def decoder_layers(
    config: ModelConfig, weights: DecoderWeights, inputs: StepInputs, attention: StepAttention
) -> Tensor:
    """Runs the new tokens of a step through the layers; their keys and values are stored on the way.

    Args:
        config: the model.
        weights: its weights.
        inputs: what to compute.
        attention: attention of this very step.

    Returns:
        [num_tokens, hidden_size], before the final norm.
    """
    hidden = functional.embedding(inputs.input_ids, weights.embedding)  # [num_tokens, hidden_size]
    cos_sin = rotary_cos_sin(weights.rotary_frequencies, config.rotary.attention_scale, inputs.positions, hidden.dtype)
    project_qkv = FAMILIES[config.model_type].project_qkv
    for index, layer in enumerate(weights.layers):
        x = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        queries, keys, values = project_qkv(
            x, layer, config, cos_sin
        )  # [num_tokens, num_heads | num_kv_heads, head_dim]
        attention.write_kv(index, keys, values)
        attended = attention.attend(index, queries, config.windows[index])  # [num_tokens, num_heads, head_dim]
        hidden = hidden + functional.linear(attended.flatten(1), layer.output, layer.output_bias)
        x = rms_norm(hidden, layer.mlp_norm, config.rms_norm_eps)
        hidden = hidden + feed_forward(x, layer)  # [num_tokens, hidden_size]
    return hidden


def final_norm(config: ModelConfig, weights: DecoderWeights, hidden: Tensor, indices: Tensor) -> Tensor:
    """What the head reads, of some tokens.

    Args:
        config: the model.
        weights: its weights.
        hidden: [num_tokens, hidden_size], see `decoder_layers`.
        indices: [n] int64, which tokens.

    Returns:
        [n, hidden_size], in the model's dtype.
    """
    return rms_norm(hidden.index_select(0, indices), weights.final_norm, config.rms_norm_eps)


def head_logits(weights: DecoderWeights, normed: Tensor) -> Tensor:
    """The logits: [n, vocab_size] float32 from [n, hidden_size]; memory of their own."""
    return functional.linear(normed, weights.head).to(torch.float32)
