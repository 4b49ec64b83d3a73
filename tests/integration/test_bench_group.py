"""The benches against the real scheduler, tokenizer and detokenizer, with a worker that has no model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.pipeline import Group, free_port
from services.runtime.config import Settings
from tests.sockets import Sockets

pytestmark = [pytest.mark.slow, pytest.mark.surface]


REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("detokenizers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_stream_of_the_pipeline_has_the_text_that_it_must_have(tmp_path: Path, detokenizers: int) -> None:
    out = tmp_path / "report.json"
    command = [
        sys.executable, "-m", "bench.pipeline", "--streams", "24", "--output-tokens", "40", "--step-ms", "2",
        "--detokenizers", str(detokenizers), "--out", str(out),
    ]  # fmt: skip
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(out.read_text())
    assert (report["num_failed"], report["num_wrong_texts"], report["tokens"]) == (0, 0, 24 * 40)
    assert len(report["cpu_us_per_token"]) == 4 + detokenizers
    costs = report["cpu_us_per_token"].values()
    assert min(costs) >= 0  # the kernel counts in 10 ms: a process that has done little may show nothing
    assert sum(costs) > 0
    assert report["worker"]["steps"] >= 40
    assert {"machine", "commit", "command"} <= set(report)
    assert "| scheduler" in result.stdout


def run_load(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.load", "--url", url, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


def test_load_counts_every_token_and_every_failure(made: Sockets, smollm2_path: Path) -> None:
    settings = Settings(model=str(smollm2_path), run_dir=str(made.directory), port=free_port(), max_queued_requests=64)
    group = Group(settings, made.directory)
    out = made.directory / "load.json"
    sizes = ["--prompt-tokens", "40", "--output-tokens", "12"]
    try:
        group.start_all(1, "--step-ms", "2")
        group.wait_ready()
        result = run_load(group.url, *sizes, "--streams", "1", "4", "--shared-prefix", "32", "--out", str(out))
        assert result.returncode == 0, result.stderr
        runs = json.loads(out.read_text())["runs"]
        assert [(run["streams"], run["requests"], run["failures"]) for run in runs] == [(1, 4, {}), (4, 16, {})]
        assert all(run["cached_tokens"] == 32 * run["requests"] for run in runs)
        for run in runs:
            assert run["output_tokens_per_s"] * run["duration_s"] == pytest.approx(12 * run["requests"], rel=0.01)
            assert run["e2e"]["median_ms"] >= run["ttft"]["median_ms"] > 0
        chat = run_load(group.url, *sizes, "--streams", "2", "--chat")
        assert chat.returncode == 0, chat.stderr
        assert re.search(r"^\| 2 +\| +8 \| +0 \|", chat.stdout, re.MULTILINE)
        too_long = run_load(group.url, "--streams", "1", "--prompt-tokens", "9000")
        assert too_long.returncode == 1
        assert "status 400" in too_long.stderr
    finally:
        group.stop()
    gone = run_load(group.url, "--streams", "1")
    assert gone.returncode == 1
    assert group.url in gone.stderr
