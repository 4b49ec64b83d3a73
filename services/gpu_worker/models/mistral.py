"""gpu_worker: Mistral. Llama's layers with one sliding window for all of them (arXiv 2310.06825)."""

from __future__ import annotations

from services.gpu_worker.models.blocks import project_qkv
from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.models.family import NO_BIASES, Biases, Family


def _read_biases(fields: ConfigFields) -> Biases:
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, False):
            raise fields.error(name, "a mistral model has none")
    return NO_BIASES


def _read_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    # The type's default is a window of 4,096; models without one say null.
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)
    expected = "full_attention" if window is None else "sliding_attention"
    for layer_type in fields.texts("layer_types") or []:
        if layer_type != expected:
            raise fields.error("layer_types", f"{layer_type!r} in a mistral model with sliding_window {window}")
    return (window,) * num_layers


MISTRAL = Family(
    model_type="mistral",
    default_num_kv_heads=8,
    default_head_dim=None,
    default_max_positions=131072,
    has_qk_norm=False,
    gguf_interleaves_heads=True,
    read_biases=_read_biases,
    read_windows=_read_windows,
    project_qkv=project_qkv,
)
