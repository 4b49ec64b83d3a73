"""gpu_worker: Qwen3 with experts (Qwen3-30B-A3B and others).

Attention is that of Qwen3; all layers have experts unless the configuration names dense ones.
"""

from __future__ import annotations

from services.gpu_worker.models.config import ExpertConfig
from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.models.family import Family
from services.gpu_worker.models.qwen3 import project_normed_qkv, read_qwen3_biases


def _read_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    # All layers or none: this type has no layers of two kinds.
    if not fields.flag("use_sliding_window", False) or fields.is_null("sliding_window"):
        return (None,) * num_layers
    return (fields.integer("sliding_window", 4096),) * num_layers


def _read_experts(fields: ConfigFields, num_layers: int) -> ExpertConfig | None:
    if fields.has("n_routed_experts"):
        raise fields.error("n_routed_experts", "a qwen3_moe model has none (num_experts)")
    # Newer files say num_local_experts.
    count_name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num_experts = fields.integer(count_name, 128, minimum=0)
    every = fields.integer("decoder_sparse_step", 1)
    dense = set(fields.integers("mlp_only_layers") or [])
    in_layers = tuple((index + 1) % every == 0 and index not in dense for index in range(num_layers))
    if not num_experts or not any(in_layers):
        return None
    num_chosen = fields.integer("num_experts_per_tok", 8)
    if num_chosen > num_experts:
        raise fields.error("num_experts_per_tok", f"{num_chosen} of {num_experts} experts")
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        normalizes_shares=fields.flag("norm_topk_prob", False),
        in_layers=in_layers,
    )


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    default_num_kv_heads=4,
    default_head_dim=None,
    default_max_positions=32768,
    has_qk_norm=True,
    gguf_interleaves_heads=False,
    read_biases=read_qwen3_biases,
    read_windows=_read_windows,
    project_qkv=project_normed_qkv,
    read_experts=_read_experts,
)
