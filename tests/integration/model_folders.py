"""The demo model as a folder of the usual files, written by transformers: the independent way to the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def write_model_folder(gguf: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json, chat_template.jinja."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    folder.mkdir()
    config = model.config.to_dict()
    config.pop("quantization_config")
    _write_json(folder / "config.json", config | {"architectures": ["LlamaForCausalLM"]})
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # it is tied
    write_weights(folder, weights, torch.bfloat16)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def write_weights(folder: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Writes model.safetensors anew."""
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})


def variant(folder: Path, place: Path, **changes: Mapping[str, object]) -> Path:
    """A folder with the same files, some JSON files of it changed: `config={"key": value}`; None takes a key away."""
    place.mkdir()
    for path in folder.iterdir():
        (place / path.name).symlink_to(path)
    for name, values in changes.items():
        path = place / f"{name}.json"
        fields = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.unlink(missing_ok=True)
        _write_json(path, {key: value for key, value in (fields | dict(values)).items() if value is not None})
    return place


def _write_json(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields), "utf-8")
