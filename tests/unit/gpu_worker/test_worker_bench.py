"""The worker's measurements of itself: what is run, and what is told of it."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.bench.__main__ import main
from services.gpu_worker.bench.engine import bench_engine
from services.gpu_worker.bench.kernel_cases import (
    Place,
    attention_cases,
    operator_cases,
    product_cases,
    sampling_cases,
)
from services.gpu_worker.bench.kernels import bench_kernels
from services.gpu_worker.bench.report import BenchError, StepCount, logs_told
from services.gpu_worker.products.four_bit import has_four_bit_products
from services.gpu_worker.products.kernels import has_fast_bfloat16, has_packed_float32
from services.gpu_worker.products.tiles import has_tile_loop
from services.gpu_worker.weights import LoadedModel
from services.runtime.config import Settings
from tests.unit.gpu_worker.step_bench import CPU
from tests.unit.gpu_worker.worker_peer import MAX_ROWS

pytestmark = pytest.mark.usefixtures("one_thread")

ENGINE = ["--context", "70", "--steps", "3", "--sampling"]


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_how_far_a_stage_is_is_told_twice_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([0.0, 0.25, 0.5, 0.75, 1.25])
    count = StepCount("decode of 2 x 7 tokens", 4, lambda: next(seconds))
    for _ in range(4):
        count.add()
    assert [line["now"] for line in lines_of(capsys)] == [
        "decode of 2 x 7 tokens", "decode of 2 x 7 tokens, 2 of 4 steps", "decode of 2 x 7 tokens, 4 of 4 steps",
    ]  # fmt: skip


def test_what_the_start_of_a_worker_logs_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    worker = logging.getLogger("services.gpu_worker.start_up")
    with logs_told():
        worker.info("warm-up: %d tokens", 64)
    worker.info("nobody hears this")
    assert lines_of(capsys) == [{"now": "warm-up: 64 tokens"}]


def test_steps_are_measured_and_held_against_the_limits(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine(settings, ["--rows", "1", "4", *ENGINE, "drawn"])
    machine, *told = lines_of(capsys)
    assert machine["machine"]["threads"] == 1
    rows = [line["row"] for line in told if "row" in line]
    assert [line["now"] for line in told if "now" in line][:3] == [
        "prefill of 1 x 70 tokens", "warm-up of 1 x 70 tokens", "decode of 1 x 70 tokens",
    ]  # fmt: skip
    assert [(row["stage"], row["rows"], row["context"]) for row in rows] == [
        ("prefill", 1, 70), ("decode", 1, 70), ("prefill", 4, 70), ("decode", 4, 70),
    ]  # fmt: skip
    for row in rows:
        assert row["step_over_forward"] >= 1
        assert min(row[name] for name in ("tokens_per_s", "bytes_per_s", "operations_per_s", "share")) > 0


@pytest.mark.parametrize(
    ("words", "problem", "num_lines"),
    [
        (["--rows", "9", *ENGINE], f"--rows: 9 are more than --max-running-requests {MAX_ROWS}", 0),
        (["--rows", "6", *ENGINE], r"6 rows of 76 tokens do not fit a pool of 400 \(--kv-cache-tokens\)", 1),
        (["--rows", "1", "--context", "300", "--steps", "1", "--sampling"], "are 304 tokens: more than the context", 0),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    words: list[str], problem: str, num_lines: int, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no start could hold before weights are read; what the pool does not, once the machine is told."""
    with pytest.raises(BenchError, match=problem):
        bench_engine(settings, [*words, "greedy"])
    assert len(lines_of(capsys)) == num_lines


def test_each_kernel_is_measured_in_each_form(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    bench_kernels(settings, ["--rows", "1", "3", "--contexts", "9", "--seconds", "0.0001"])
    _, *told = lines_of(capsys)
    rows = [line["row"] for line in told if "row" in line]
    assert len(told) == 2 * len(rows)  # before each of them what it is
    assert told[0]["now"].startswith("qkv ")
    assert told[0]["now"].endswith(", 1 rows")
    assert any(str(line.get("now")).endswith(", 9 tokens of context") for line in told)
    kinds = {row["kernel"].split()[0].rstrip(",") for row in rows}
    assert kinds == {"qkv", "output", "gate_up", "down", "attention", "sum", "gate", "sampling"}
    assert all(0 < row["us_least"] <= row["us_quartiles"][0] <= row["us"] <= row["us_quartiles"][1] for row in rows)
    assert all(row["share"] > 0 for row in rows)


def test_the_costs_of_cases_are_those_of_what_they_run(model: LoadedModel) -> None:
    config = dataclasses.replace(model.config, hidden_size=64)  # whole groups of 32 inputs
    place = Place(config, CPU, torch.float32)
    products = [case for case in product_cases(place, [5]) if case.kernel.startswith("output")]
    width = config.num_heads * config.head_dim
    assert all(case.num_operations == 2 * 5 * 64 * width for case in products)
    assert products[0].num_bytes == 4 * (64 * width + 5 * (64 + width))
    forms = {case.form for case in product_cases(place, [1])}
    assert ("packed float32" in forms, "packed bfloat16" in forms) == (has_packed_float32(), has_fast_bfloat16())
    assert ("bfloat16 tiles" in forms) == has_tile_loop()
    assert ("4 bits" in forms) == has_four_bit_products()
    decode, prefill = attention_cases(place, 4, [3], [9])
    per_pair = 4 * config.num_heads * config.head_dim
    assert (decode.num_operations, prefill.num_operations) == (3 * 9 * per_pair, 45 * per_pair)
    kv_bytes = 2 * config.num_kv_heads * config.head_dim * 4
    assert decode.num_bytes == 3 * 9 * kv_bytes + 2 * 3 * width * 4
    for case in [*products, decode, prefill, *operator_cases(place, [2]), *sampling_cases(place, [2])]:
        case.run()
        case.run()


def test_what_cannot_be_measured_is_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENWAY_MODEL", str(tmp_path / "nothing"))
    monkeypatch.setenv("TOKENWAY_DEVICE", "cpu")
    monkeypatch.setenv("TOKENWAY_NUM_THREADS", "1")
    assert main(["kernels", "--rows", "1", "--contexts", "1", "--seconds", "1"]) == 1
    [line] = lines_of(capsys)
    assert str(tmp_path / "nothing") in line["error"]
