"""gpu_worker: Qwen3, dense. Queries and keys are normalised head by head; a head's width is a field of its own."""

from __future__ import annotations

from torch import Tensor

from services.gpu_worker.models.blocks import rms_norm, split_qkv
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.models.family import Biases, Family
from services.gpu_worker.models.layer_weights import LayerWeights
from services.gpu_worker.models.qwen2 import read_qwen_windows
from services.gpu_worker.models.rotary import rotate


def _read_biases(fields: ConfigFields) -> Biases:
    attention = fields.flag("attention_bias", False)
    if fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias", "a qwen3 model has none")
    return Biases(qkv=attention, output=attention, mlp=False)


def _project_qkv(
    x: Tensor, layer: LayerWeights, config: ModelConfig, cos_sin: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, see `family.ProjectQkv`; the norm comes before the rotation."""
    assert layer.query_norm is not None
    assert layer.key_norm is not None
    heads, values = split_qkv(x, layer, config)
    queries = rms_norm(
        heads[:, : config.num_heads], layer.query_norm, config.rms_norm_eps
    )  # [num_tokens, num_heads, d]
    keys = rms_norm(heads[:, config.num_heads :], layer.key_norm, config.rms_norm_eps)  # [num_tokens, num_kv_heads, d]
    return rotate(queries, *cos_sin), rotate(keys, *cos_sin), values


QWEN3 = Family(
    model_type="qwen3",
    default_num_kv_heads=32,
    default_head_dim=128,
    default_max_positions=32768,
    has_qk_norm=True,
    gguf_interleaves_heads=False,
    read_biases=_read_biases,
    read_windows=read_qwen_windows,
    project_qkv=_project_qkv,
)
