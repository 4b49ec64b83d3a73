"""Makes a Hugging Face style configuration from GGUF metadata, for the architectures that the worker runs.

The other direction is llama.cpp's convert_hf_to_gguf.py. What the metadata does not tell (biases, tied embeddings,
rows of the logits) is read off the names and shapes of the tensors.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

from services.model_files.errors import ModelFileError
from services.model_files.gguf_metadata import GgufHeader

_Value = TypeVar("_Value")

# GGUF architecture -> model_type. llama.cpp files Mistral and SmolLM2 under llama.
_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_WITH_EXPERTS = ("qwen3moe",)
_SOFTMAX = 1  # of expert_gating_func


def config_from_gguf(header: GgufHeader) -> dict[str, object]:
    """Return the keys of a config.json for the model in this file.

    Raises:
        ModelFileError: the architecture is not supported or a field is missing, of the wrong type or contradictory.
    """
    _refuse_unsupported(header)
    arch = _text(header, "general.architecture")
    num_heads = _integer(header, f"{arch}.attention.head_count")
    hidden_size = _integer(header, f"{arch}.embedding_length")
    head_dim = header.integer(f"{arch}.attention.key_length") or hidden_size // num_heads
    _check_head_dims(header, arch, head_dim)
    sliding_window = header.integer(f"{arch}.attention.sliding_window") or None
    config: dict[str, object] = {
        "model_type": "mistral" if arch == "llama" and sliding_window else _MODEL_TYPES[arch],
        "hidden_size": hidden_size,
        "intermediate_size": _integer(header, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _integer(header, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": header.integer(f"{arch}.attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _number(header, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": header.number(f"{arch}.rope.freq_base") or 10000.0,
        "rope_scaling": _rope_scaling(header, arch),
        "sliding_window": sliding_window,
        "max_position_embeddings": _integer(header, f"{arch}.context_length"),
        "vocab_size": _num_logits(header, hidden_size),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "bos_token_id": header.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.integer("tokenizer.ggml.eos_token_id"),
    }
    if arch == "qwen2" and sliding_window:
        config["use_sliding_window"] = True
    return config | _experts(header, arch) if arch in _WITH_EXPERTS else config


def generation_config_from_gguf(header: GgufHeader) -> dict[str, object]:
    """Return the keys of a generation_config.json that the metadata tells: the end ids and sampling defaults if any."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [header.integer(f"tokenizer.ggml.{key}") for key in keys]
    end_ids = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    config: dict[str, object] = {"eos_token_id": end_ids} if end_ids else {}
    sampling = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    for name, key in sampling.items():
        value = header.number(f"general.sampling.{key}")
        if value is not None:
            config[name] = int(value) if name == "top_k" else value
    return config


def _refuse_unsupported(header: GgufHeader) -> None:
    arch = _text(header, "general.architecture")
    if arch not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise ModelFileError(header.path, f"field general.architecture: {arch!r} is not supported (supported: {known})")
    num_parts = header.integer("split.count") or 1
    if num_parts > 1:
        raise ModelFileError(header.path, f"field split.count: one of {num_parts} parts, merge them into one file")
    if arch not in _WITH_EXPERTS and header.integer(f"{arch}.expert_count"):
        raise ModelFileError(header.path, f"field {arch}.expert_count: mixtures of experts are not supported")


def _experts(header: GgufHeader, arch: str) -> dict[str, object]:
    """What a configuration says of experts. Layers without a router are dense; shares add up to 1 unless said."""
    if header.integer(f"{arch}.expert_shared_count"):
        raise ModelFileError(header.path, f"field {arch}.expert_shared_count: shared experts are not supported")
    if header.integer(f"{arch}.expert_gating_func") not in (None, _SOFTMAX):
        raise ModelFileError(header.path, f"field {arch}.expert_gating_func: only softmax (1) is supported")
    if header.number(f"{arch}.expert_weights_scale") not in (None, 0.0, 1.0):
        raise ModelFileError(header.path, f"field {arch}.expert_weights_scale: only 1 is supported")
    layers = range(_integer(header, f"{arch}.block_count"))
    return {
        "num_experts": _integer(header, f"{arch}.expert_count"),
        "num_experts_per_tok": _integer(header, f"{arch}.expert_used_count"),
        "moe_intermediate_size": _integer(header, f"{arch}.expert_feed_forward_length"),
        "norm_topk_prob": header.flag(f"{arch}.expert_weights_norm") is not False,
        "mlp_only_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in header.tensors],
    }


def _check_head_dims(header: GgufHeader, arch: str, head_dim: int) -> None:
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        value = header.integer(key)
        if value is not None and value != head_dim:
            raise ModelFileError(header.path, f"field {key}: {value} differs from the head dimension {head_dim}")


def _num_logits(header: GgufHeader, hidden_size: int) -> int:
    name = "output.weight" if "output.weight" in header.tensors else "token_embd.weight"
    tensor = header.tensors.get(name)
    if tensor is None:
        raise ModelFileError(header.path, f"has no tensor {name}")
    if len(tensor.shape) != 2 or tensor.shape[0] != hidden_size:
        raise ModelFileError(header.path, f"tensor {name}: shape {tensor.shape}, embedding_length {hidden_size}")
    return tensor.shape[1]


def _rope_scaling(header: GgufHeader, arch: str) -> dict[str, object] | None:
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header)
    kind = header.text(f"{arch}.rope.scaling.type") or "none"
    factor = header.number(f"{arch}.rope.scaling.factor") or header.number(f"{arch}.rope.scale_linear")
    if kind == "none" and factor is None:
        return None
    if factor is None:
        raise ModelFileError(header.path, f"field {arch}.rope.scaling.factor is missing (scaling type {kind})")
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        return _yarn_scaling(header, f"{arch}.rope.scaling", factor)
    raise ModelFileError(header.path, f"field {arch}.rope.scaling.type: {kind!r} is not supported")


def _yarn_scaling(header: GgufHeader, prefix: str, factor: float) -> dict[str, object]:
    original = _integer(header, f"{prefix}.original_context_length")
    scaling: dict[str, object] = {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
    }  # fmt: skip
    for key in ("beta_fast", "beta_slow"):
        value = header.number(f"{prefix}.yarn_{key}")
        if value is not None:
            scaling[key] = value
    multiplier = header.number(f"{prefix}.attn_factor")
    if multiplier is not None and multiplier != 1.0:
        # In GGUF a multiple of YaRN's usual scale, in config.json the scale itself.
        scaling["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(header: GgufHeader) -> dict[str, object]:
    """Recover Llama 3's scaling: GGUF keeps no parameters but one divisor for each frequency, in a tensor."""
    arch = _text(header, "general.architecture")
    divisors = _read_float32(header, "rope_freqs.weight")
    scaling: dict[str, object] = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = header.number(f"{arch}.rope.freq_base") or 10000.0
    expected = _llama3_divisors(theta, len(divisors), float(divisors.max()))
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelFileError(header.path, "tensor rope_freqs.weight does not follow Llama 3's rule for frequencies")
    return scaling


def _llama3_divisors(theta: float, num_frequencies: int, factor: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The divisors [num_frequencies] that low 1, high 4 and 8,192 original positions give for this factor."""
    low, high, original = 1.0, 4.0, 8192.0
    wavelengths = 2 * math.pi * theta ** (np.arange(num_frequencies) / num_frequencies)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / factor + smooth)


def _read_float32(header: GgufHeader, name: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    tensor = header.tensors[name]
    num_bytes = 4 * math.prod(tensor.shape)
    if tensor.ggml_type != 0 or num_bytes > 1 << 20:
        raise ModelFileError(header.path, f"tensor {name} is not a short float32 vector")
    with header.path.open("rb") as file:
        file.seek(header.data_start + tensor.offset)
        raw = file.read(num_bytes)
    if len(raw) != num_bytes:
        raise ModelFileError(header.path, f"tensor {name} runs over the end of the file: it is truncated")
    return np.frombuffer(raw, dtype="<f4")


def _text(header: GgufHeader, key: str) -> str:
    return _required(header, key, header.text(key))


def _integer(header: GgufHeader, key: str) -> int:
    value = _required(header, key, header.integer(key))
    if value <= 0:
        raise ModelFileError(header.path, f"field {key}: {value} is not a positive number")
    return value


def _number(header: GgufHeader, key: str) -> float:
    return _required(header, key, header.number(key))


def _required(header: GgufHeader, key: str, value: _Value | None) -> _Value:
    if value is None:
        raise ModelFileError(header.path, f"field {key} is missing")
    return value
