"""Tells one model's files from another's without reading all of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from services.model_files.errors import ModelFileError
from services.model_files.source import ModelFiles

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
_DIGEST_BYTES = 8


def model_digest(files: ModelFiles) -> str:
    """A short hexadecimal digest of a model's configuration and of samples of its weights, wherever they lie.

    Equal files give equal digests. Other weights of the same shapes differ nearly everywhere, hence in the samples:
    64 of 4 KiB from each file of weights, evenly spaced, its beginning and its end among them.

    Raises:
        ModelFileError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    digest.update(json.dumps(files.config, sort_keys=True).encode())
    paths = [files.path] if files.kind == "gguf" else sorted(files.path.glob("*.safetensors"))
    for path in paths:
        _add_samples(digest, path)
    return digest.hexdigest()


def _add_samples(digest: hashlib.blake2b, path: Path) -> None:
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            digest.update(num_bytes.to_bytes(8, "little"))
            for number in range(_NUM_SAMPLES):
                file.seek(max(0, num_bytes - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from None
