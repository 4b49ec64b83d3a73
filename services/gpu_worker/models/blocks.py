"""gpu_worker: the parts that every model family is built of, as plain functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.layer_weights import LayerWeights
from services.gpu_worker.models.rotary import rotate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension (arXiv 1910.07467).

    Half precisions are normalised in float32 and rounded before the weight multiplies them, as the models were trained.

    Args:
        x: [..., width].
        weight: [width].
        eps: added to the mean square.

    Returns:
        The shape and dtype of x.
    """
    if x.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps)
    normalised = functional.rms_norm(x.to(torch.float32), weight.shape, None, eps)
    return normalised.to(x.dtype) * weight


def feed_forward(x: Tensor, layer: LayerWeights) -> Tensor:
    """Gated feed-forward part, silu(gate) * up (arXiv 2002.05202).

    Args:
        x: [num_tokens, hidden_size], normalised.
        layer: the layer's weights.

    Returns:
        [num_tokens, hidden_size].
    """
    gate, up = functional.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)  # [num_tokens, intermediate]
    return functional.linear(functional.silu(gate).mul_(up), layer.down, layer.down_bias)  # [num_tokens, hidden_size]


def split_qkv(x: Tensor, layer: LayerWeights, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """The fused projection.

    Args:
        x: [num_tokens, hidden_size], normalised.
        layer: the layer's weights.
        config: the model.

    Returns:
        Queries and keys in one, [num_tokens, num_heads + num_kv_heads, head_dim], and values
        [num_tokens, num_kv_heads, head_dim]; both are views of the product.
    """
    qkv = functional.linear(x, layer.qkv, layer.qkv_bias)  # [num_tokens, q + kv + kv]
    heads = qkv.view(qkv.shape[0], -1, config.head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    num_rotated = config.num_heads + config.num_kv_heads
    return heads[:, :num_rotated], heads[:, num_rotated:]


def project_qkv(
    x: Tensor, layer: LayerWeights, config: ModelConfig, cos_sin: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a family that only rotates (see `family.ProjectQkv`)."""
    heads, values = split_qkv(x, layer, config)
    rotated = rotate(heads, *cos_sin)  # [num_tokens, num_heads + num_kv_heads, head_dim]
    return rotated[:, : config.num_heads], rotated[:, config.num_heads :], values
