"""Writes small GGUF files through the gguf package: an independent hand for the readers under test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

# The fields of a tiny Llama without its tokenizer; ints are written as uint32, floats as float32.
TINY_LLAMA: dict[str, object] = {
    "llama.context_length": 256,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
}


def write_gguf(
    path: Path,
    arch: str = "llama",
    metadata: Mapping[str, object] | None = None,
    tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """Write `metadata` (bool, int, float, str, list of one kind) and float32 `tensors`; returns `path`."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in (TINY_LLAMA if metadata is None else metadata).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, data in (tensors or {"token_embd.weight": np.zeros((100, 32), np.float32)}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_fields(
    tokens: list[str], kinds: list[int], model: str, pre: str | None, **more: object
) -> dict[str, object]:
    """Return the fields of a tiny Llama with this tokenizer; keys of `more` go under `tokenizer.ggml.`."""
    fields: dict[str, object] = {
        **TINY_LLAMA,
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }
    if pre is not None:
        fields["tokenizer.ggml.pre"] = pre
    return fields | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
