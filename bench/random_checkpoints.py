"""Small models with random weights in the files of a real one, written without any model library.

For measuring and for tests: config.json and one model.safetensors, named and shaped like a Hugging Face checkpoint.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
SLIDING_WINDOW = 24


@dataclass(frozen=True)
class Shape:
    """How large a model is; the experts are those of qwen3_moe, whose first layer is dense."""

    vocab_size: int = 160
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_positions: int = 512
    num_experts: int = 8
    num_chosen: int = 2
    expert_size: int = 32


def write_checkpoint(folder: Path, family: str, shape: Shape | None = None, seed: int = 0) -> Path:
    """Writes a float32 model of a family into a new folder, and returns the folder."""
    shape = shape or Shape()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(family, shape)), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(size, generator=generator) * (0.2 if len(size) > 1 else 0.1) + (1.0 if "norm" in name else 0)
        for name, size in _sizes(family, shape).items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def write_config(folder: Path, family: str, shape: Shape) -> Path:
    """Writes the config.json of a bfloat16 model alone into a new folder, for `--load-format dummy`; the folder."""
    folder.mkdir(parents=True)
    config = _config(family, shape) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes float32 tensors: the length of a JSON header, the header, the numbers."""
    header: dict[str, object] = {}
    start = 0
    for name, tensor in tensors.items():
        end = start + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().numpy().tobytes())


def _config(family: str, shape: Shape) -> dict[str, object]:
    config: dict[str, object] = {
        "model_type": family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if family == "mistral":
        config["sliding_window"] = SLIDING_WINDOW
    if family == "qwen3_moe":
        config |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_chosen,
            "moe_intermediate_size": shape.expert_size,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        }
    return config


def _sizes(family: str, shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden = shape.hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        sizes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
        }
        if family == "qwen3_moe" and index > 0:
            sizes[f"{layer}.mlp.gate.weight"] = (shape.num_experts, hidden)
            for expert in range(shape.num_experts):
                sizes |= _gated_sizes(f"{layer}.mlp.experts.{expert}", hidden, shape.expert_size)
        else:
            sizes |= _gated_sizes(f"{layer}.mlp", hidden, shape.intermediate_size)
        if family == "qwen2":
            sizes |= {f"{layer}.self_attn.{name}_proj.bias": (size,) for name, size in
                      (("q", queries), ("k", keys), ("v", keys))}  # fmt: skip
        if family.startswith("qwen3"):
            sizes |= {f"{layer}.self_attn.{name}_norm.weight": (shape.head_dim,) for name in ("q", "k")}
    return sizes | {"model.norm.weight": (hidden,), "lm_head.weight": (shape.vocab_size, hidden)}


def _gated_sizes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }
