"""gpu_worker: Llama (1 to 3, SmolLM2 and others of that shape). Full attention, biases only where the file says so."""

from __future__ import annotations

from services.gpu_worker.models.blocks import project_qkv
from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.models.family import Biases, Family


def _read_biases(fields: ConfigFields) -> Biases:
    attention = fields.flag("attention_bias", False)
    return Biases(qkv=attention, output=attention, mlp=fields.flag("mlp_bias", False))


def _read_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    if fields.has("sliding_window"):
        raise fields.error("sliding_window", "a llama model has none (the type mistral has)")
    return (None,) * num_layers


LLAMA = Family(
    model_type="llama",
    default_num_kv_heads=None,
    default_head_dim=None,
    default_max_positions=2048,
    has_qk_norm=False,
    gguf_interleaves_heads=True,
    read_biases=_read_biases,
    read_windows=_read_windows,
    project_qkv=project_qkv,
)
