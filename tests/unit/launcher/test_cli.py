"""The command line: what is started with which settings, what is refused, how it says so."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.launcher.cli import main
from services.launcher.models import DEMO_MODEL
from services.runtime.config import Settings

_ROOT = Path(__file__).parents[3]


def _tokenway(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENWAY_")} | variables
    command = [sys.executable, "-m", "services.launcher", *arguments]
    return subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=30)


def test_the_help_of_serve_lists_every_setting() -> None:
    shown = _tokenway("serve", "--help")
    assert shown.returncode == 0
    for field in dataclasses.fields(Settings):
        assert f"--{field.name.replace('_', '-')}" in shown.stdout


def test_help_and_version_need_nothing_else() -> None:
    assert _tokenway("--help").stdout.startswith("usage: tokenway")
    assert _tokenway().stdout == _tokenway("--help").stdout
    assert _tokenway("--version").stdout.startswith("tokenway ")


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        (["--prot", "80"], {}, "--prot"),
        (["--port", "http"], {}, "--port must be a whole number, not 'http'"),
        (["--port", "70000"], {}, "--port must be between 0 and 65535"),
        (["--device", "tpu"], {}, "--device must be one of auto, cpu, cuda"),
        ([], {"TOKENWAY_PROT": "80"}, "unknown setting 'prot' in the environment"),
        (["--config", "/no/such.toml"], {}, "cannot read settings from /no/such.toml"),
        ([""], {}, "--model must not be empty"),
        (["--model", " "], {}, "--model must not be empty"),
        ([], {"TOKENWAY_MODEL": ""}, "--model must not be empty"),
        (["--role", "x"], {}, "--role must be one of tokenizer, scheduler, gpu_worker, detokenizer"),
        (["--role"], {}, "--role"),
        (["--role", "scheduler"], {}, "--role needs --scheduler-endpoint or --run-dir"),
        (["--role", "tokenizer", "--port", "0"], {}, "--role needs --scheduler-endpoint or --run-dir"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_in_one_line_with_status_2(
    arguments: list[str], variables: dict[str, str], reason: str
) -> None:
    result = _tokenway("serve", *arguments, **variables)
    assert result.returncode == 2
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_prc_06_a_port_in_use_is_named_before_anything_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        began_s = time.monotonic()
        result = _tokenway("serve", "--port", str(port))
        assert time.monotonic() - began_s < 10
    assert result.returncode == 2
    assert result.stderr == f"tokenway: port {port} on 127.0.0.1 is in use by another process; choose one with --port\n"
    assert result.stdout == ""


def test_models_lists_the_demo_model_and_where_it_lies(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENWAY_MODELS_DIR", str(tmp_path))
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == "smollm2:135m" and line.endswith(str(smollm2_path)) for line in lines)
    assert lines[-1] == f"models fetched by name go to {tmp_path}"


@pytest.mark.parametrize(
    "words", [["models", "--models-dir"], ["models", "--models-dir", "/elsewhere", "--models-dir"]]
)
def test_models_looks_into_the_folder_that_the_flag_names(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENWAY_MODELS_DIR", "/not/this")
    folder = tmp_path / "模型"
    folder.mkdir()
    (folder / DEMO_MODEL.file_name).write_bytes(b"GGUF")
    assert main([*words, str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=2)[2] == str(folder / DEMO_MODEL.file_name)
    assert lines[-1] == f"models fetched by name go to {folder}"


@pytest.mark.parametrize("place", [1, 2, 3])
def test_models_pull_fetches_into_the_folder_that_the_flag_names(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENWAY_MODELS_DIR", "/not/this")
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / DEMO_MODEL.file_name).write_bytes(b"GGUF")  # fetched before, so nothing is fetched now
    words = ["models", "pull", "smollm2:135m"]
    words[place:place] = ["--models-dir", str(folder)]
    assert main(words) == 0
    assert str(folder) in capsys.readouterr().out
