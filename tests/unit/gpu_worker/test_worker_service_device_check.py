"""The script for machines with a GPU, as far as a machine without one can try it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.device import check, logits
from bench.device.limits import cost_of
from bench.device.report import Outcome, held
from bench.device.roofline import QWEN3_14B
from bench.random_checkpoints import write_config
from services.gpu_worker.models.checkpoint_layout import allocate_weights, placements
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.parse_config import parse_model_config
from services.model_files.source import open_model

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_measures_nothing() -> None:
    done = subprocess.run(
        [ROOT / "bench/device_check.sh"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == check.EXIT_NO_DEVICE == 3
    assert done.stdout == "no CUDA device: nothing was measured\n"


@pytest.mark.parametrize("name", ["attention", "service"])
def test_the_checks_themselves_hold_on_a_cpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--device", "cpu", "--only", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(f"| {name},") and "ok" in line for line in lines) == 4


def test_the_table_of_limits_is_made_on_a_cpu_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--device", "cpu", "--only", "roofline"]) == 0
    assert check.main(["--device", "cpu", "--only", "throughput"]) == 0
    printed = capsys.readouterr().out
    for name in ("limit, memory", "graph capture", "decode of 3", "prefill of 64", "throughput, 3 requests"):
        assert f"| {name}" in printed


def test_what_a_model_costs_follows_from_its_configuration(tmp_path: Path) -> None:
    config = parse_model_config(open_model(write_config(tmp_path / "model", "qwen3", QWEN3_14B)))
    cost = cost_of(config, torch.bfloat16)
    weights = dummy_sizes(config)
    assert cost.weight_bytes == weights
    assert cost.kv_bytes_per_token == 163_840
    assert cost.decode_bytes([10, 5]) == weights + 15 * 163_840
    assert cost.prefill_operations(2) == 2 * cost.matrix_operations_per_token + 3 * cost.attention_operations_per_pair
    # A product of n x n is 2 n^2 operations a token, so the layers' matrices count twice their numbers.
    assert cost.matrix_operations_per_token == weights - 2 * config.vocab_size * config.hidden_size


def dummy_sizes(config: ModelConfig) -> int:
    """Bytes of the matrices that a step reads, counted on the placements of a checkpoint."""
    laid_out = placements(config, allocate_weights(config, torch.bfloat16, torch.device("meta")))
    matrices = [item for item in laid_out if item.target.dim() == 2 and item.name != "model.embed_tokens.weight"]
    return sum(item.target.nbytes for item in matrices)


def test_a_wrong_result_gives_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logits, "MOST_DIFFERENCE", -1.0)
    assert check.main(["--device", "cpu", "--only", "logits"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_check_that_raises_gives_status_1_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[Outcome]:
        raise RuntimeError("no such kernel")

    def fine() -> Iterator[Outcome]:
        yield held("fine", True, "7")

    monkeypatch.setattr(check, "checks", lambda name: [check.Check("bad", (), broken), check.Check("good", (), fine)])
    assert check.main(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: no such kernel" in printed
    assert "fine" in printed


def test_what_is_not_installed_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "zmq" else find_spec(name))
    assert check.main(["--device", "cpu", "--only", "service"]) == 0
    assert "skipped, not installed here: zmq" in capsys.readouterr().out
