"""Sampling defaults from generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.model_files.errors import ModelFileError
from services.model_files.generation_config import SamplingDefaults, load_sampling_defaults
from services.model_files.source import ModelFiles, open_model
from tests.unit.model_files.gguf_files import TINY_LLAMA, write_gguf


def _folder(path: Path, **fields: object) -> ModelFiles:
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "generation_config.json").write_text(json.dumps(fields))
    return open_model(path)


def test_published_fields_become_defaults_and_none_turns_them_off(tmp_path: Path) -> None:
    files = _folder(tmp_path, temperature=0.6, top_p=0.95, top_k=20, min_p=0, max_new_tokens=2048, do_sample=True)
    assert load_sampling_defaults(files) == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0)
    assert load_sampling_defaults(files, "none") == SamplingDefaults(None, None, None, None)


def test_absent_and_null_fields_say_nothing(tmp_path: Path, smollm2_path: Path) -> None:
    assert load_sampling_defaults(_folder(tmp_path, temperature=None)) == SamplingDefaults()
    assert load_sampling_defaults(open_model(smollm2_path)) == SamplingDefaults()


def test_gguf_metadata_may_hold_them_too(tmp_path: Path) -> None:
    metadata = TINY_LLAMA | {"general.sampling.temp": 0.7, "general.sampling.top_k": 40}
    files = open_model(write_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert load_sampling_defaults(files) == SamplingDefaults(temperature=0.7, top_k=40)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", -1),
        ("temperature", 11),
        ("temperature", True),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", [0.1]),
        ("min_p", float("inf")),
    ],
)
def test_illegal_values_name_the_field(tmp_path: Path, name: str, value: object) -> None:
    files = _folder(tmp_path, **{name: value})
    with pytest.raises(ModelFileError, match=rf"generation_config\.json: field {name}: .* is no legal value"):
        load_sampling_defaults(files)
    assert load_sampling_defaults(files, "none") == SamplingDefaults()
