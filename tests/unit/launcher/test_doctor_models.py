"""What the doctor says of a model: its files, its tokenizer, and whether it fits, by the worker's own code."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.random_checkpoints import FAMILIES, Shape, write_checkpoint, write_safetensors
from services.gpu_worker.attention.paged_cpu import reads_halves
from services.gpu_worker.fit_check import Machine, activation_bytes, fit
from services.gpu_worker.models.parse_config import parse_model_config
from services.gpu_worker.start_up import forms_of
from services.gpu_worker.weights import load_laid_out
from services.launcher.cli import main
from services.launcher.doctor.findings import Finding, Verdict
from services.launcher.doctor.model_checks import check_model
from services.model_files.source import open_model
from services.runtime.config import Settings, inherited_environment

pytestmark = [pytest.mark.slow, pytest.mark.surface]


_ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def machine(total: float = 16e9, available: float = 8e9) -> Machine:
    return Machine("2.9", "", "", 2, int(total), int(available))


def summary(findings: Sequence[Finding]) -> list[tuple[str, Verdict]]:
    return [(finding.name, finding.verdict) for finding in findings]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_weights_take_is_what_they_take_when_loaded(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / family, family)
    settings = Settings(model=str(folder), max_running_requests=4)
    found = fit(settings, CPU, machine(), is_config_only=False)
    loaded = load_laid_out(open_model(folder), forms_of(settings))
    assert found.problem == ""
    assert loaded.report.num_bytes_placed == 4 * found.num_weights
    # A head that is left plain beside its tied embedding is one matrix, which only loading can tell.
    tied = 4 * loaded.config.vocab_size * loaded.config.hidden_size
    assert loaded.weights.num_bytes <= found.weight_bytes <= loaded.weights.num_bytes + tied
    assert found.kv_bytes_per_token == 2 * 3 * 2 * 16 * (2 if reads_halves(16) else 4)
    assert (found.context, found.dtype, found.model_type) == (512, "float32", family)
    assert fit(settings, CPU, machine(), is_config_only=True) == found


def test_what_does_not_fit_is_told_with_numbers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    settings = Settings(model=str(folder), max_running_requests=4, kv_cache_tokens=512)
    assert fit(settings, CPU, machine(), False).pool_tokens == 512
    no_room = fit(settings, CPU, machine(available=1e5), False)
    assert "weights and a step need" in no_room.problem
    assert "0.00 GB are free" in no_room.problem
    assert no_room.remedy.startswith("choose a smaller model")
    no_step = fit(settings, CPU, machine(available=no_room.weight_bytes + 1), False)
    assert no_step.remedy.startswith("set a lower --chunked-prefill-size or --max-running-requests, choose a smaller")
    no_pool = fit(dataclasses.replace(settings, kv_cache_tokens=2**30), CPU, machine(), False)
    assert no_pool.problem.startswith("--kv-cache-tokens 1073741824 takes")
    too_long = fit(dataclasses.replace(settings, max_model_len=513), CPU, machine(), False)
    assert too_long.problem.startswith("--max-model-len 513 is more than the 512 positions")


def test_several_workers_on_one_cpu_must_fit_together(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "llama", "llama")
    alone = fit(Settings(model=str(folder)), CPU, machine(), is_config_only=False)
    tight = machine(available=1.5 * (alone.weight_bytes + alone.activation_bytes))
    assert "weights and a step" not in fit(Settings(model=str(folder)), CPU, tight, is_config_only=False).problem
    both = fit(Settings(model=str(folder), dp_size=2), CPU, tight, is_config_only=False)
    assert "weights and a step of 2 workers need" in both.problem
    roomy = fit(Settings(model=str(folder), dp_size=2), CPU, machine(), is_config_only=False)
    assert (roomy.problem, roomy.pool_tokens < alone.pool_tokens) == ("", True)


@pytest.mark.parametrize(
    ("name", "too_much"), [("max_model_len", 99999), ("kv_cache_tokens", 99_999_999), ("kv_cache_tokens", 2**31 - 1)]
)
def test_a_setting_that_asks_too_much_is_named_with_what_is_possible(name: str, too_much: int, tmp_path: Path) -> None:
    def with_value(value: int) -> Settings:
        values: dict[str, Any] = {name: value}
        return dataclasses.replace(settings, **values)

    settings = Settings(model=str(write_checkpoint(tmp_path / "model", "llama")), max_running_requests=4)
    found = fit(with_value(too_much), CPU, machine(), False)
    match = re.fullmatch(f"set --{name.replace('_', '-')} ([0-9]+) or less, or leave it out", found.remedy)
    assert match, found
    assert fit(with_value(int(match[1])), CPU, machine(), False).problem == ""
    shown = list(check_model(with_value(too_much)))[1]
    assert (shown.name, shown.verdict, shown.remedy.split()[1]) == ("fit", Verdict.FAILED, found.remedy.split()[1])


def test_no_room_for_a_pool_is_no_fault_of_the_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    settings = Settings(model=str(folder), max_running_requests=4, mem_fraction_static=0.01)
    found = fit(settings, CPU, machine(available=1e7), False)
    assert found.remedy.startswith("raise --mem-fraction-static, free memory")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (None, "mend --chat-template"),
        ("{% if %}", "mend --chat-template"),
        ("{{ messages[0].content }}", "mend the setting that it names"),
    ],
)
def test_a_template_of_the_operators_own_is_not_blamed_on_the_model(
    text: str | None, remedy: str, smollm2_path: Path, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    if text is not None:
        template.write_text(text)
    settings = Settings(model=str(smollm2_path), chat_template=str(template), tool_call_parser="mistral")
    found = list(check_model(settings))[-1]
    assert (found.name, found.verdict, found.remedy) == ("tokenizer", Verdict.FAILED, remedy)


def test_a_larger_step_takes_more(tmp_path: Path) -> None:
    config = parse_model_config(open_model(write_checkpoint(tmp_path / "model", "llama")))
    few, many = (activation_bytes(Settings(), config, torch.float32, number) for number in (64, 640))
    assert few < many < 11 * few


def test_a_tensor_that_is_missing_or_cut_off_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    settings = Settings(model=str(folder))
    assert "is truncated" in fit(settings, CPU, machine(), False).problem
    write_safetensors(weights, {"model.norm.weight": torch.zeros(64)})
    assert "tensor model.embed_tokens.weight is missing" in fit(settings, CPU, machine(), False).problem


def test_the_demo_model_is_well(smollm2_path: Path) -> None:
    findings = list(check_model(Settings(model=str(smollm2_path), kv_cache_tokens=16384, numerics="exact")))
    assert summary(findings) == [("model", Verdict.OK), ("fit", Verdict.OK), ("tokenizer", Verdict.OK)]
    assert "GGUF Q4_1 llama, 98.4 MB, context 8,192" in findings[0].text
    assert "135 M weights take 651.3 MB, used in float32, a token of KV cache 46.1 kB" in findings[1].text
    assert "room for 16,384 tokens" in findings[1].text
    assert findings[2].text == "works; a chat of one word is 31 tokens"


def test_a_model_without_tokenizer_and_of_an_unknown_family_says_both(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama", Shape(max_positions=64))
    found = list(check_model(Settings(model=str(folder), kv_cache_tokens=64)))
    assert summary(found) == [("model", Verdict.OK), ("fit", Verdict.OK), ("tokenizer", Verdict.FAILED)]
    assert "tokenizer.json" in found[2].text
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    found = list(check_model(Settings(model=str(folder))))
    assert found[1].verdict == Verdict.FAILED
    assert "'mamba' is not supported" in found[1].text
    assert all("\n" not in finding.text for finding in found)


def test_a_pool_shorter_than_the_context_is_a_warning_with_the_length_that_fits(smollm2_path: Path) -> None:
    found = list(check_model(Settings(model=str(smollm2_path), kv_cache_tokens=1024)))[1]
    remedy = "set --max-model-len 1024 or less, or raise --kv-cache-tokens"
    assert (found.verdict, found.remedy) == (Verdict.WARNING, remedy)


@pytest.mark.parametrize("model", ["/no/such/model", "smollm3"])
def test_prc_10_a_model_that_is_nowhere_is_named(model: str) -> None:
    [found] = check_model(Settings(model=model))
    assert (found.verdict, f"model {model}" in found.text) == (Verdict.FAILED, True)


def test_the_status_and_the_json_tell_whether_a_server_would_start(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(smollm2_path), "--port", "0", "--kv-cache-tokens", "16384"]
    assert main(["doctor", "--json", *words]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["ok"] is True
    names = {check["name"] for check in found["checks"]}
    assert {"python", "packages", "open files", "disk", "port", "run directory", "model", "fit", "tokenizer"} <= names
    assert shown.err == ""
    assert main(["doctor", *words, "--scheduler-endpoint", "tcp://127.0.0.1:1"]) == 1
    assert "failed   scheduler          tcp://127.0.0.1:1: Connection refused\n" in capsys.readouterr().out
    assert main(["doctor", "--page-size", "0"]) == 2
    assert capsys.readouterr().err == "tokenway: --page-size must be between 1 and 1024, not 0\n"


def test_the_worker_that_asks_tells_what_is_wrong_with_its_settings() -> None:
    environment = inherited_environment() | {"TOKENWAY_DEVICE": "cuda"}
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    command = [sys.executable, "-m", "services.gpu_worker.fit_check"]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "--device cuda: torch finds no CUDA device" in json.loads(done.stdout)["error"]
