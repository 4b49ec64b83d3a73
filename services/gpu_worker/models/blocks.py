"""gpu_worker: queries, keys and values, as plain functions of tensors that families are built of."""

from __future__ import annotations

from torch import Tensor

from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.layer_weights import LayerWeights
from services.gpu_worker.models.operators import Operators
from services.gpu_worker.models.projection import Projection


def project_qkv(
    x: Tensor, layer: LayerWeights[Projection], config: ModelConfig, operators: Operators
) -> tuple[Tensor, Tensor]:
    """Queries and keys in one, and values, of a family that does nothing more to them (see `family.ProjectQkv`)."""
    qkv = layer.qkv(x).to(layer.input_norm.dtype)  # [num_tokens, q + kv + kv], in the model's dtype
    heads = qkv.view(qkv.shape[0], -1, config.head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    num_rotated = config.num_heads + config.num_kv_heads
    return heads[:, :num_rotated], heads[:, num_rotated:]
