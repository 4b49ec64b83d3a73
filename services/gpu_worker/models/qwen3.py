"""gpu_worker: Qwen3, dense (`qwen3_moe` has experts).

Queries and keys are normalised head by head; a head's width is a field of its own.
"""

from __future__ import annotations

from torch import Tensor

from services.gpu_worker.models.blocks import project_qkv
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.models.family import Biases, Family
from services.gpu_worker.models.layer_weights import LayerWeights
from services.gpu_worker.models.operators import Operators
from services.gpu_worker.models.projection import Projection
from services.gpu_worker.models.qwen2 import read_qwen_windows


def read_qwen3_biases(fields: ConfigFields) -> Biases:
    """Which projections of Qwen3 have biases."""
    attention = fields.flag("attention_bias", False)
    if fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias", "a qwen3 model has none")
    return Biases(qkv=attention, output=attention, mlp=False)


def project_normed_qkv(
    x: Tensor, layer: LayerWeights[Projection], config: ModelConfig, operators: Operators
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normalised head by head, and values: see `family.ProjectQkv`."""
    assert layer.query_norm is not None
    assert layer.key_norm is not None
    heads, values = project_qkv(x, layer, config, operators)
    weights = layer.query_norm, layer.key_norm
    return operators.norm_heads(heads, config.num_heads, weights, config.rms_norm_eps), values


QWEN3 = Family(
    model_type="qwen3",
    default_num_kv_heads=32,
    default_head_dim=128,
    default_max_positions=32768,
    has_qk_norm=True,
    gguf_interleaves_heads=False,
    read_biases=read_qwen3_biases,
    read_windows=read_qwen_windows,
    project_qkv=project_normed_qkv,
)
