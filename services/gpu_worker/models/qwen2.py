"""gpu_worker: Qwen2 and Qwen2.5. Always biases on query, key and value; a window on the upper layers if asked for."""

from __future__ import annotations

from services.gpu_worker.models.blocks import project_qkv
from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.models.family import Biases, Family


def _read_biases(fields: ConfigFields) -> Biases:
    if not fields.flag("attention_bias", True):
        raise fields.error("attention_bias", "a qwen2 model always has biases on query, key and value")
    if fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias", "a qwen2 model has none")
    return Biases(qkv=True, output=False, mlp=False)


def read_qwen_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Windows of Qwen2 and Qwen3: `layer_types` where given, else every layer from `max_window_layers` on.

    Nothing is windowed unless `use_sliding_window` says so.
    """
    window = None
    if fields.flag("use_sliding_window", False) and not fields.is_null("sliding_window"):
        window = fields.integer("sliding_window", 4096)
    layer_types = fields.texts("layer_types")
    if layer_types is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if index >= first else None for index in range(num_layers))
    if len(layer_types) != num_layers:
        raise fields.error("layer_types", f"has {len(layer_types)} entries for {num_layers} layers")
    return tuple(_window_of(fields, layer_type, window) for layer_type in layer_types)


def _window_of(fields: ConfigFields, layer_type: str, window: int | None) -> int | None:
    if layer_type == "full_attention":
        return None
    if layer_type != "sliding_attention":
        raise fields.error("layer_types", f"{layer_type!r} is not supported")
    if window is None:
        raise fields.error("layer_types", "a sliding_attention layer in a model without a sliding window")
    return window


QWEN2 = Family(
    model_type="qwen2",
    default_num_kv_heads=32,
    default_head_dim=None,
    default_max_positions=32768,
    has_qk_norm=False,
    gguf_interleaves_heads=False,
    read_biases=_read_biases,
    read_windows=read_qwen_windows,
    project_qkv=project_qkv,
)
