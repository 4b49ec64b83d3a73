"""`tokenway models`: what is listed, fetched, removed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from services.launcher.cli import main
from services.launcher.model_facts import model_facts, size_text
from services.launcher.models import DEMO_MODEL


@pytest.fixture(autouse=True)
def _no_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models directory that the settings name."""
    folder = tmp_path / "模型 🙂"
    folder.mkdir()
    monkeypatch.setenv("TOKENWAY_MODELS_DIR", str(folder))
    return folder


def _listed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "FORMAT", "CONTEXT", "PATH"]
    return {line.split()[0]: line for line in lines[1:-1]} | {"": lines[-1]}


def _folder(path: Path, **config: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    (path / "model.safetensors").write_bytes(bytes(1_500_000))
    return path


def test_the_demo_model_is_listed_with_size_format_context_and_place(
    models: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models"]) == 0
    listed = _listed(capsys)
    assert listed["smollm2:135m"].split()[1:5] == ["98.4", "MB", "GGUF", "Q4_1"]
    assert " 8,192 " in listed["smollm2:135m"]
    assert listed["smollm2:135m"].endswith(str(smollm2_path))
    assert listed["qwen3:0.6b"].split() == ["qwen3:0.6b", "Qwen/Qwen3-0.6B", "not", "on", "this", "disk"]
    assert listed[""] == f"models fetched by name go to {models}"


def test_what_was_fetched_is_listed_and_what_is_damaged_says_so(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _folder(models / "Qwen--Qwen3-0.6B", dtype="bfloat16", max_position_embeddings=40960)
    _folder(models / "some--other", torch_dtype="torch.float16")
    (models / "broken.gguf").write_bytes(b"GGUF")
    snapshot = _folder(tmp_path / "hub" / "models--a--cached" / "snapshots" / ("0" * 40), dtype="float32")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    assert main(["models"]) == 0
    listed = _listed(capsys)
    assert "safetensors bfloat16" in listed["qwen3:0.6b"]
    assert "40,960" in listed["qwen3:0.6b"]
    assert "safetensors float16" in listed["some/other"]
    assert "damaged: version runs over the end of the file" in listed["broken.gguf"]
    assert listed["a/cached"].endswith(str(snapshot))


@pytest.mark.parametrize("words", [["--models-dir"], ["--models-dir", "/elsewhere", "--models-dir"]])
def test_models_looks_into_the_folder_that_the_flag_names(
    words: list[str], models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / DEMO_MODEL.file_name).write_bytes(b"GGUF")
    assert main(["models", *words, str(other)]) == 0
    listed = _listed(capsys)
    assert listed["smollm2:135m"].endswith(str(other / DEMO_MODEL.file_name))
    assert listed[""] == f"models fetched by name go to {other}"


@pytest.mark.parametrize("place", [1, 2, 3])
def test_models_pull_fetches_into_the_folder_that_the_flag_names(
    place: int, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / DEMO_MODEL.file_name).write_bytes(b"GGUF")  # fetched before, so nothing is fetched now
    words = ["models", "pull", "smollm2:135m"]
    words[place:place] = ["--models-dir", str(folder)]
    assert main(words) == 0
    assert str(folder) in capsys.readouterr().out


@pytest.mark.parametrize("name", ["qwen3:0.6b", "Qwen/Qwen3-0.6B"])
def test_a_model_is_removed_with_what_is_left_of_a_broken_download(
    name: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _folder(models / "Qwen--Qwen3-0.6B")
    _folder(models / "Qwen--Qwen3-0.6B.partial")
    kept = _folder(models / "Qwen--Qwen3-1.7B")
    assert main(["models", "rm", name, "--yes"]) == 0
    assert capsys.readouterr().out == f"removed {folder}: 3.0 MB are free again\n"
    assert list(models.iterdir()) == [kept]


def test_a_model_in_the_models_directory_that_is_a_link_is_removed_as_a_link(models: Path, tmp_path: Path) -> None:
    target = _folder(tmp_path / "kept")
    (models / "a--b").symlink_to(target)
    assert main(["models", "rm", "a/b", "--yes"]) == 0
    assert (target / "model.safetensors").is_file()
    assert not list(models.iterdir())


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("YES ", 0), ("", 1), ("n", 1), ("yep", 1)])
def test_a_person_is_asked_before_a_model_is_removed(
    answer: str, status: int, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(models / "a--b")
    asked: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)

    def asked_for(question: str) -> str:
        asked.append(question)
        return answer

    monkeypatch.setattr("builtins.input", asked_for)
    assert main(["models", "rm", "a/b"]) == status
    assert asked == [f"remove {folder} (1.5 MB)? [y/N] "]
    assert folder.exists() == (status == 1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("smollm2:135m", "was not fetched by this command: it is left alone"),
        ("qwen3:8b", "is not in "),
        ("..", "is not in "),
        (".", "is not in "),
        ("", "is not in "),
        ("../模型 🙂", "is not in "),
    ],
)
def test_nothing_else_is_removed(
    name: str, reason: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _folder(models / "a--b")
    assert main(["models", "rm", name, "--yes"]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1
    assert (models / "a--b" / "config.json").is_file()


def test_without_a_terminal_nobody_is_asked(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _folder(models / "a--b")
    assert main(["models", "rm", "a/b"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.0 kB"), (1500, "1.5 kB"), (98_400_000, "98.4 MB"), (1.5e9, "1.50 GB"), (2e12, "2.00 TB")],
)
def test_sizes_are_those_of_disks(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


def test_facts_of_a_path_that_is_not_there(tmp_path: Path) -> None:
    facts = model_facts(tmp_path / "none")
    assert (facts.num_bytes, facts.problem) == (0, "no such folder or file")
