"""`tokenway bench kernels|engine`: what is asked of the child, what it tells, and how that is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.random_checkpoints import write_checkpoint
from services.launcher.bench.worker_benches import engine_table, kernel_table
from services.launcher.child_questions import follow_child
from services.launcher.cli import main
from services.launcher.errors import CommandError
from services.runtime.config import Settings

CHILD = "tests.unit.launcher.telling_child"
RATES = {"bytes_per_s": 7.5e9, "operations_per_s": 90e9, "share": 0.8, "bound": "memory"}


def told(*lines: str) -> list[dict[str, Any]]:
    return list(follow_child(CHILD, Settings(), lines))


def test_what_a_child_tells_comes_object_by_object() -> None:
    assert told('{"row": 1}', '{"row": 2}', '{"done": true}', '{"row": 3}') == [{"row": 1}, {"row": 2}]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['{"row": 1}', '{"error": "no such thing"}'], "no such thing"),
        (['{"row": 1}', "!"], f"{CHILD} failed: over"),
        ([], f"{CHILD} failed: status 0"),
        (["nonsense"], f"{CHILD} said what is not understood: 'nonsense'"),
    ],
)
def test_a_child_that_fails_is_told_of_in_one_line(lines: list[str], problem: str) -> None:
    with pytest.raises(CommandError) as raised:
        told(*lines)
    assert str(raised.value) == problem


def test_what_is_followed_no_longer_is_ended() -> None:
    following = follow_child(CHILD, Settings(), ['{"row": 1}'] * 3)
    assert next(following) == {"row": 1}
    following.close()


def test_rows_become_tables() -> None:
    kernels = [
        {
            "kernel": "qkv 960x576",
            "form": "plain float32",
            "rows": 16,
            "context": 0,
            "us": 1234.56,
            "us_least": 1100.0,
            "us_quartiles": [1200.0, 5432.1],
            **RATES,
        },
        {
            "kernel": "attention, decode",
            "form": "P",
            "rows": 4,
            "context": 256,
            "us": 9.0,
            "us_least": 8.8,
            "us_quartiles": [8.9, 9.1],
            **RATES,
        },
    ]
    lines = kernel_table(kernels).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        "qkv 960x576", "plain float32", "16", "-", "1,234.6", "1,100.0", "1,200.0 to 5,432.1", "7.50", "90.0",
        "80%", "memory",
    ]  # fmt: skip
    assert lines[3].split("|")[4].strip() == "256"
    engine = [{"stage": "decode", "rows": 4, "context": 64, "tokens_per_s": 81.25, "step_over_forward": 1.04, **RATES}]
    assert [cell.strip() for cell in engine_table(engine).splitlines()[2].split("|")[1:-1]] == [
        "decode", "4", "64", "81.2", "1.040", "7.50", "90.0", "80%", "memory",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["kernels", "--rows", "0"], "--rows must be between 1 and 8192"),
        (["kernels", "--contexts", "9999999"], "--contexts must be between 1 and 1048576"),
        (["kernels", "--seconds", "0"], "--seconds must be above 0 and at most 60"),
        (["engine", "--steps", "0"], "--steps must be between 1 and 1048576"),
        (["engine", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["engine", "./nowhere"], "model ./nowhere: no such folder or file"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_child_is_started(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "./nowhere" in words else [str(write_checkpoint(tmp_path / "tiny", "llama"))]
    assert main(["bench", words[0], *model, *words[1:]]) == 2
    assert capsys.readouterr() == ("", f"tokenway: {problem}\n")


@pytest.mark.slow
@pytest.mark.surface
@pytest.mark.timeout(300)
def test_a_worker_is_measured_in_a_child(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_checkpoint(tmp_path / "tiny", "llama"))
    common = ["--device", "cpu", "--num-threads", "1", "--kv-cache-tokens", "512"]
    small = ["--rows", "1", "3", "--contexts", "20", "--seconds", "0.001"]
    assert main(["bench", "kernels", model, *small, *common, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["device"] == "cpu"
    assert {row["rows"] for row in found["rows"]} >= {1, 3}
    assert all(
        0 < row["us_least"] <= row["us_quartiles"][0] <= row["us"] <= row["us_quartiles"][1] for row in found["rows"]
    )
    steps = ["--rows", "1", "3", "--context", "20", "--steps", "4"]
    assert main(["bench", "engine", model, *steps, *common]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("the CPU, 1 threads: limits ")
    assert [line.split("|")[1].strip() for line in lines[4:]] == ["prefill", "decode"] * 2
    assert main(["bench", "engine", model, *steps, *common, "--max-model-len", "16"]) == 2
    assert capsys.readouterr().err == (
        "tokenway: --context 20, 3 tokens of warm-up and --steps 4 are 27 tokens: more than the context of 16\n"
    )
