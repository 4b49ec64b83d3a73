"""The measurements that start a server of their own run to their end and find what they look for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
REPOSITORY = Path(__file__).parents[2]


def run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_an_idle_server_is_measured_and_leaves_nothing_behind(smollm2_path: Path) -> None:
    output = run("bench.idle", str(smollm2_path), "--seconds", "1")
    for name in ("launcher", "scheduler", "gpu_worker", "tokenizer", "detokenizer", "all"):
        assert f"| {name} " in output
    assert "with status 130; left behind: nothing" in output


def test_what_a_cached_prefix_saves_is_measured(smollm2_path: Path) -> None:
    output = run("bench.prefix_cache", str(smollm2_path), "--prefix-tokens", "320", "--rounds", "2")
    assert output.count("| 320 ") + output.count(" 320 |") == 2  # twenty pages of 16, found in each round
    assert "median ratio" in output
