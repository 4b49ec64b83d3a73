"""Tiny random models of every family, written by transformers: what the worker's models are held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

WINDOW = 7
VOCAB_SIZE = 96

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_EXPERTS: dict[str, Any] = {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "llama-biases-tied-llama3": lambda: transformers.LlamaConfig(
        **_SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=dict(_LLAMA3)
    ),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
    "qwen2-window-yarn": lambda: transformers.Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, rope_parameters=dict(_YARN)
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=32),
    "qwen3-biases": lambda: transformers.Qwen3Config(**_SIZES, head_dim=32, attention_bias=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=True),
    "qwen3_moe-dense-layer": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, **_EXPERTS, mlp_only_layers=[2], attention_bias=True
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """A model in a folder as `save_pretrained` writes it, and the logits that transformers computes with it."""

    folder: Path
    model: Any

    def logits(self, token_ids: list[int]) -> Tensor:
        """[len(token_ids), vocab_size] float32."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits


def make_tiny_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> TinyModel:
    """Makes a model with large random weights, norms and biases included, so that nothing can be left out unnoticed."""
    torch.manual_seed(len(name))
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in parameter_name else 0.0, std=0.2)
    model = model.to(dtype)
    model.save_pretrained(folder)
    return TinyModel(folder, model)
