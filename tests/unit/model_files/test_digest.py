"""A model's digest: the same for the same files wherever they lie, another for other weights or configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench.random_checkpoints import write_checkpoint
from services.model_files.digest import model_digest
from services.model_files.errors import ModelFileError
from services.model_files.source import open_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "llama", "llama")


def copy_of(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder, folder.with_name(name)))


def test_a_copy_elsewhere_is_the_same_model(folder: Path) -> None:
    assert model_digest(open_model(copy_of(folder, "copy"))) == model_digest(open_model(folder))


def test_other_weights_of_the_same_shapes_are_another_model(folder: Path) -> None:
    other = copy_of(folder, "other")
    [weights] = other.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert model_digest(open_model(other)) != model_digest(open_model(folder))


def test_another_configuration_is_another_model_and_its_layout_is_none(folder: Path) -> None:
    other = copy_of(folder, "other")
    config = json.loads((other / "config.json").read_text("utf-8"))
    (other / "config.json").write_text(json.dumps(config, indent=7), "utf-8")
    assert model_digest(open_model(other)) == model_digest(open_model(folder))
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}), "utf-8")
    assert model_digest(open_model(other)) != model_digest(open_model(folder))


def test_a_gguf_file_has_one_too(smollm2_path: Path) -> None:
    assert len(model_digest(open_model(smollm2_path))) == 16


def test_weights_that_cannot_be_read_are_named(folder: Path) -> None:
    files = open_model(folder)
    [weights] = folder.glob("*.safetensors")
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ModelFileError, match=weights.name):
        model_digest(files)
