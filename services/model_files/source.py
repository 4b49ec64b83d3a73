"""Opens a model: a folder as published on the hub, or one GGUF file, seen through one description.

Whatever the form, the rest of the code reads `config` in the spelling of a Hugging Face config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.model_files.errors import ModelFileError
from services.model_files.gguf_config import config_from_gguf, generation_config_from_gguf
from services.model_files.gguf_metadata import GgufHeader, read_gguf_header

# Configurations are a few kilobytes and tokenizer.json some megabytes; more is not such a file.
_MAX_TEXT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk.

    Attributes:
        kind: `folder` (config.json, tokenizer.json, *.safetensors) or `gguf` (one file).
        path: The folder, or the GGUF file itself.
        config: config.json as it stands, or the same keys made from GGUF metadata (see `gguf_config`).
        generation_config: generation_config.json, or what GGUF metadata tells of it; empty if there is none.
        gguf: The GGUF header (metadata, tensor names and shapes), None for a folder.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    config: dict[str, object]
    generation_config: dict[str, object]
    gguf: GgufHeader | None = None


def open_model(path: str | Path) -> ModelFiles:
    """Read what describes the model at `path`: a folder, a GGUF file, or a folder that holds just one GGUF file.

    Raises:
        ModelFileError: nothing is there, a needed file is missing or damaged, or the kind is not supported; one line
            that names the file and the field.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelFileError(path, "no such folder or file")
    if path.suffix.lower() != ".gguf":
        raise ModelFileError(path, "is neither a folder nor a .gguf file")
    return _open_gguf(path)


def model_name(path: Path) -> str:
    """What a model is called when nobody names it: its folder as it is, or its GGUF file without the ending."""
    if not path.is_dir():
        return path.stem
    gguf_files = list(path.glob("*.gguf"))
    has_one_file = len(gguf_files) == 1 and not (path / "config.json").is_file()
    return gguf_files[0].stem if has_one_file else path.absolute().name


def read_text(path: Path) -> str:
    """The text of one of a model's files, at most 256 MiB of UTF-8.

    Raises:
        ModelFileError: the file is larger, cannot be read or is not UTF-8.
    """
    try:
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise ModelFileError(path, "is larger than any such file should be (256 MiB)")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelFileError(path, "is not UTF-8 text") from None


def read_json_object(path: Path) -> dict[str, object]:
    """Read a JSON object from `path`.

    Raises:
        ModelFileError: the file cannot be read, is not JSON or not an object; names the line where it breaks.
    """
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ModelFileError(path, f"is not valid JSON: {error.msg} at line {error.lineno}") from None
    except RecursionError:
        raise ModelFileError(path, "is not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ModelFileError(path, "must hold a JSON object")
    return value


def _open_folder(folder: Path) -> ModelFiles:
    config_path = folder / "config.json"
    if not config_path.is_file():
        gguf_files = sorted(folder.glob("*.gguf"))
        if len(gguf_files) == 1:
            return _open_gguf(gguf_files[0])
        if gguf_files:
            names = ", ".join(file.name for file in gguf_files)
            raise ModelFileError(folder, f"has no config.json but several GGUF files, name one of them: {names}")
        raise ModelFileError(folder, "has no config.json and no .gguf file")
    config = read_json_object(config_path)
    if not isinstance(config.get("model_type"), str):
        raise ModelFileError(config_path, "field model_type is missing or not a string")
    generation_path = folder / "generation_config.json"
    generation_config = read_json_object(generation_path) if generation_path.is_file() else {}
    return ModelFiles("folder", folder, config, generation_config)


def _open_gguf(path: Path) -> ModelFiles:
    header = read_gguf_header(path)
    return ModelFiles("gguf", path, config_from_gguf(header), generation_config_from_gguf(header), header)
