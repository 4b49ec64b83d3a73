"""The command line: what is started with which settings, what is refused, how it says so."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.launcher.cli import COMMANDS
from services.launcher.serve import _START_ORDER, _child_specs
from services.runtime.config import Settings
from services.runtime.rank_place import rank_place, rank_variables
from services.wire.members import Role
from tests.unit.model_files.gguf_files import write_gguf

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


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("arguments", [[], ["--role", "gpu_worker", "--run-dir", "{}"]])
def test_more_ranks_than_can_share_the_model_are_refused_before_one_is_started(
    tmp_path: Path, kind: str, arguments: list[str]
) -> None:
    if kind == "gguf":
        model = write_gguf(tmp_path / "model.gguf")
        heads = "num_attention_heads 4 with num_key_value_heads 2"
    else:
        model = tmp_path / "model"
        model.mkdir()
        counts = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 64, "vocab_size": 90}
        (model / "config.json").write_text(json.dumps({"model_type": "llama"} | counts))
        (model / "model.safetensors").touch()  # nobody gets as far as to open it
        heads = "num_attention_heads 6 with num_key_value_heads 3"
    most = heads.split()[1]
    given = [argument.format(tmp_path / "run") for argument in arguments]
    result = _tokenway("serve", str(model), "--tp-size", "64", "--port", "0", *given)
    line = f"tokenway: --tp-size 64: {heads} can be shared by at most {most} ranks; set --tp-size {most} or less\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)


def test_prc_06_an_unknown_command_is_named_in_one_line_with_status_2() -> None:
    result = _tokenway("sreve")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("tokenway: there is no command 'sreve'; there are serve, chat")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    shown = _tokenway(name, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"Example: tokenway {name}" in shown.stdout


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "serve"])
def test_a_flag_that_a_command_does_not_know_is_named_in_one_line_with_status_2(name: str) -> None:
    result = _tokenway(name, *["x"] * (name in ("render", "trace")), "--prot=80")
    assert result.returncode == 2
    assert "--prot" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_loads_no_library_of_the_processes(name: str) -> None:
    script = (
        f"import sys; from services.launcher import cli; cli._command({name!r})\n"
        "print(*{module.split('.')[0] for module in sys.modules})"
    )
    shown = subprocess.run([sys.executable, "-c", script], cwd=_ROOT, capture_output=True, text=True, check=True)
    loaded = set(shown.stdout.split())
    assert not loaded & {"torch", "triton", "safetensors", "transformers", "tokenizers", "aiohttp", "jinja2", "gguf"}
    if name in ("chat", "bench", "models"):  # what begins at once for a person
        assert not loaded & {"zmq", "prometheus_client", "huggingface_hub"}


def test_each_worker_is_told_which_it_is_and_stands_in_for_the_others() -> None:
    specs = _child_specs(_START_ORDER, Settings(dp_size=3, num_detokenizers=2, api_key="secret"))
    workers = [spec for spec in specs if spec.kind == "gpu_worker"]
    assert [spec.name for spec in workers] == ["gpu_worker-0", "gpu_worker-1", "gpu_worker-2"]
    told = [{name: spec.environment.get(f"TOKENWAY_{name}") for name in ("DP_RANK", "DP_SIZE")} for spec in workers]
    assert told == [{"DP_RANK": rank, "DP_SIZE": "3"} for rank in (None, "1", "2")]
    assert all("TOKENWAY_API_KEY" not in spec.environment for spec in workers)
    assert [spec.kind for spec in specs].count("detokenizer") == 2


def test_a_shared_model_has_a_process_for_each_rank() -> None:
    specs = [spec for spec in _child_specs(_START_ORDER, Settings(dp_size=2, tp_size=2)) if spec.kind == "gpu_worker"]
    names = ["gpu_worker-0", "gpu_worker-0-rank-1", "gpu_worker-1", "gpu_worker-1-rank-1"]
    assert [spec.name for spec in specs] == names
    places = [rank_place(spec.environment) for spec in specs]
    assert [(place.rank, place.size, place.local_rank) for place in places if place] == [(0, 2, 0), (1, 2, 1)] * 2
    assert [spec.environment.get("TOKENWAY_DP_RANK", "0") for spec in specs] == ["0", "0", "1", "1"]
    assert [spec.environment["TOKENWAY_INSTANCE"] for spec in specs] == ["0", "0-rank-1", "1", "1-rank-1"]
    ports = [spec.environment["MASTER_PORT"] for spec in specs]
    assert ports[0] == ports[1] != ports[2] == ports[3]


def test_workers_of_a_server_are_no_ranks_of_what_it_was_started_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rank_variables(1, 2, 4000).items():
        monkeypatch.setenv(name, value)
    assert all(rank_place(spec.environment) is None for spec in _child_specs(_START_ORDER, Settings()))


def test_one_role_of_a_shared_model_is_all_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(tp_size=2)
    assert [spec.name for spec in _child_specs([Role.GPU_WORKER], settings)] == ["gpu_worker", "gpu_worker-rank-1"]
    for name, value in rank_variables(1, 2, 4000).items():
        monkeypatch.setenv(name, value)
    (only,) = _child_specs([Role.GPU_WORKER], settings)  # torchrun has said which rank it is
    assert rank_place(only.environment) == rank_place(rank_variables(1, 2, 4000))
