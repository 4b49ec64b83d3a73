"""What can be told of a model on this disk without loading it: format, size, context, type. Reads headers only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.model_files.errors import ModelFileError
from services.model_files.source import ModelFiles, open_model

_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True)
class ModelFacts:
    """A model on disk; `problem` is why it cannot be read, "" when it can. `context` 0: the files do not say."""

    path: Path
    num_bytes: int
    format: str = ""
    model_type: str = ""
    dtype: str = ""
    context: int = 0
    problem: str = ""


def model_facts(path: Path) -> ModelFacts:
    """Looks at a folder or GGUF file; what is wrong with it is told in the facts."""
    num_bytes = size_of(path)
    try:
        files = open_model(path)
    except ModelFileError as error:
        return ModelFacts(path, num_bytes, problem=error.problem)
    context = files.config.get("max_position_embeddings")
    return ModelFacts(
        path=path,
        num_bytes=num_bytes,
        format="GGUF" if files.kind == "gguf" else "safetensors",
        model_type=str(files.config.get("model_type", "")),
        dtype=_dtype(files),
        context=context if type(context) is int else 0,
    )


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links count as what they lead to."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.exists() else 0


def weight_bytes(path: Path) -> int:
    """Bytes of the weight files alone."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*") if file.suffix in _WEIGHTS)
    return size_of(path)


def size_text(num_bytes: float) -> str:
    """A size for people, in powers of 1,000 as disks and hubs count."""
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= power:
            return f"{num_bytes / power:.{1 if unit == 'MB' else 2}f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _dtype(files: ModelFiles) -> str:
    """What the checkpoint says its weights are, or the quantization that most of a GGUF file's tensors have."""
    if files.gguf is None:
        return str(files.config.get("dtype") or files.config.get("torch_dtype") or "").removeprefix("torch.")
    kinds = [tensor.ggml_type for tensor in files.gguf.tensors.values() if len(tensor.shape) > 1]
    return _GGML_TYPES.get(max(set(kinds), key=kinds.count), "another type") if kinds else ""


# Of the GGUF format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_GGML_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4",
}  # fmt: skip
