"""What a step asks of the machine, against counting it pair by pair; and how steps are held against limits."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.gpu_worker import machine_limits as measuring
from services.gpu_worker.fp8 import E4M3
from services.gpu_worker.machine_limits import MachineLimits, cpu_buffer_bytes, machine_limits
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.projection import Projection
from services.gpu_worker.products.two_forms import TwoForms
from services.gpu_worker.roofline import LOG_INTERVAL_S, Loaded, Machine, Roofline, measure_machine
from services.gpu_worker.step_cost import ModelCost, StepCost
from services.gpu_worker.step_meter import Bound, Stage, StepMeter
from services.gpu_worker.weights import LoadedModel, LoadReport
from services.wire.columns import pack_int32
from services.wire.steps import StepPlan, StepResult
from tests.unit.gpu_worker.step_bench import CPU

KV_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, width, float32
LIMITS = MachineLimits(bytes_per_s=1e9, operations_per_s=1e10)
rows_of_steps = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=5)


@dataclass(frozen=True)
class Sized:
    """A projection of so many bytes."""

    num_bytes: int

    def __call__(self, x: Tensor) -> Tensor:
        return x


def cost_of(model: LoadedModel, rows: Sequence[tuple[int, int]], windows: tuple[int | None, ...]) -> StepCost:
    cost = ModelCost(dataclasses.replace(model.config, windows=windows), model.weights, KV_BYTES)
    return cost.of_step([start for start, _ in rows], [count for _, count in rows])


def counted(config: ModelConfig, weights: DecoderWeights[Projection], rows: Sequence[tuple[int, int]],
            windows: tuple[int | None, ...]) -> tuple[int, int]:  # fmt: skip
    """Bytes and operations, token by token and layer by layer."""
    num_rows, num_tokens = len(rows), sum(count for _, count in rows)
    matrices = [each for layer in model_matrices(weights) for each in layer]
    num_operations = sum(2 * num_tokens * shape[0] * shape[1] for shape in matrices)
    num_operations += 2 * num_rows * config.vocab_size * config.hidden_size
    num_bytes = weights.num_bytes - weights.embedding.nbytes + num_tokens * config.hidden_size * 4
    num_bytes += num_tokens * KV_BYTES + num_rows * config.vocab_size * 4
    for window in windows:
        for start, count in rows:
            seen: set[int] = set()
            for position in range(start, start + count):
                attended = range(max(0, position + 1 - (window or position + 1)), position + 1)
                num_operations += 4 * len(attended) * config.num_heads * config.head_dim
                seen |= set(attended)
            num_bytes += len(seen) * KV_BYTES // config.num_layers
    return num_bytes, num_operations


def model_matrices(weights: DecoderWeights[Projection]) -> list[list[tuple[int, ...]]]:
    return [[tuple(each.weight.shape) for each in layer.projections] for layer in weights.layers]  # type: ignore[attr-defined]


@given(rows_of_steps, st.tuples(*[st.none() | st.integers(1, 50)] * 2))
@settings(max_examples=60)
def test_a_step_costs_what_counting_it_pair_by_pair_gives(
    model: LoadedModel, rows: list[tuple[int, int]], windows: tuple[int | None, int | None]
) -> None:
    found = cost_of(model, rows, windows)
    assert (found.num_bytes, found.num_operations) == counted(model.config, model.weights, rows, windows)
    assert found.num_tokens == sum(count for _, count in rows)
    assert found.is_decode == all(count == 1 for _, count in rows)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=5))
def test_proposals_cost_what_further_tokens_of_their_row_and_their_logits_cost(
    model: LoadedModel, rows: list[tuple[int, int, int]]
) -> None:
    cost = ModelCost(model.config, model.weights, KV_BYTES)
    starts, counts, proposed = ([row[index] for row in rows] for index in range(3))
    together = [own + more for own, more in zip(counts, proposed, strict=True)]
    found, whole = cost.of_step(starts, together, sum(proposed)), cost.of_step(starts, together)
    of_logits = model.config.vocab_size * sum(proposed)
    assert found.num_tokens == whole.num_tokens
    assert found.num_bytes == whole.num_bytes + 4 * of_logits
    assert found.num_operations == whole.num_operations + 2 * of_logits * model.config.hidden_size
    assert found.is_decode == all(count == 1 for count in counts)


def test_the_form_that_so_many_rows_go_through_is_what_is_read(model: LoadedModel) -> None:
    two = TwoForms(Sized(100), Sized(1000), most_few_rows=3)
    layers = tuple(layer.with_projections(lambda dense: two) for layer in model.weights.layers)
    weights: DecoderWeights[Projection] = DecoderWeights(
        model.weights.embedding, layers, model.weights.final_norm, Sized(7), model.weights.rotary_frequencies
    )
    cost = ModelCost(model.config, weights, KV_BYTES)
    norms = weights.final_norm.nbytes + sum(layer.norm_bytes for layer in layers)
    assert cost.weight_bytes(3, 3) == 4 * len(layers) * 100 + norms + 7
    assert cost.weight_bytes(4, 1) == 4 * len(layers) * 1000 + norms + 7


def test_a_step_that_verifies_is_a_decode_with_more_logits(model: LoadedModel) -> None:
    """Beside the same tokens as a prefill: a token is sampled behind each proposal, at the cost of its logits."""
    cost = ModelCost(model.config, model.weights, KV_BYTES)
    verified, chunk = cost.of_step([5, 9], [4, 1], num_proposed=3), cost.of_step([5, 9], [4, 1])
    assert (verified.is_decode, chunk.is_decode) == (True, False)
    assert verified.num_tokens == chunk.num_tokens
    assert verified.num_bytes - chunk.num_bytes == 3 * 4 * model.config.vocab_size
    assert verified.num_operations - chunk.num_operations == 3 * 2 * model.config.vocab_size * model.config.hidden_size
    plan = StepPlan(
        1, 0, b"", (), b"", b"", b"", pack_int32([0, 1]), pack_int32([5, 9]), pack_int32([4, 1]), bytes([1, 1]),
        pack_int32([3, 0]), pack_int32([1, 1, 1]),
    )  # fmt: skip
    result = StepResult(1, 0, b"", b"", b"", b"", b"", b"", b"", forward_us=2000, step_us=2500)
    machine = Machine("cpu", "the CPU", "float32", 2, LIMITS)
    roofline = Roofline(machine, Loaded(LoadReport(0, 0.0, 0.0, 0, 0.0, 0.0), None), cost)
    assert roofline.count(plan, result) == verified


# ---------------------------------------------------------------- beside the limits


def test_a_step_is_held_against_the_longer_of_both_times() -> None:
    meter = StepMeter(LIMITS)
    meter.count(StepCost(True, 2, 10**8, 10**8), forward_us=200_000, step_us=250_000)
    meter.count(StepCost(False, 90, 10**8, 4 * 10**9), forward_us=500_000, step_us=500_000)
    meter.count(StepCost(True, 2, 10**8, 10**8), forward_us=200_000, step_us=190_000)  # as clocks may tell
    decode, prefill = meter.totals[Stage.DECODE], meter.totals[Stage.PREFILL]
    assert (decode.num_steps, decode.num_tokens, decode.forward_us) == (2, 4, 400_000)
    assert decode.limit_s == {Bound.MEMORY: pytest.approx(0.2), Bound.COMPUTE: 0.0}
    assert prefill.limit_s == {Bound.MEMORY: 0.0, Bound.COMPUTE: pytest.approx(0.4)}
    assert meter.sampling_us == 50_000
    assert list(meter.news()) == [
        "prefill: 1 passes, 90 tokens in 0.50 s (180 tokens/s), 0.20 GB/s, 8.0 GFLOP/s: 80% of the limit (compute)",
        "decode: 2 passes, 4 tokens in 0.40 s (10 tokens/s), 0.50 GB/s, 0.5 GFLOP/s: 50% of the limit (memory)",
        "sampling and the rest of steps: 0.05 s",
    ]
    assert list(meter.news()) == []
    meter.count(StepCost(True, 1, 10**8, 10**8), forward_us=100_000, step_us=100_000)
    assert [line.split(" (")[0] for line in meter.news()] == ["decode: 1 passes, 1 tokens in 0.10 s"]


def test_news_of_steps_are_logged_every_so_often(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    report = LoadReport(0, 0.0, 0.0, 0, 0.0, 0.0)
    machine = Machine("cpu", "the CPU", "float32", 2, LIMITS)
    roofline = Roofline(machine, Loaded(report, None), ModelCost(model.config, model.weights, KV_BYTES))
    caplog.set_level(logging.INFO)
    plan = StepPlan(
        1, 0, b"", (), b"", b"", b"", pack_int32([0, 1]), pack_int32([5, 0]), pack_int32([1, 7]), bytes([1, 1])
    )
    result = StepResult(1, 0, b"", b"", b"", b"", b"", b"", b"", forward_us=2000, step_us=2500)
    roofline.log_news(100.0)
    assert roofline.count(plan, result) == cost_of(model, [(5, 1), (0, 7)], model.config.windows)
    roofline.log_news(99.9 + LOG_INTERVAL_S)
    assert not caplog.messages
    roofline.log_news(100.0 + LOG_INTERVAL_S)
    assert [message.split(" in ")[0] for message in caplog.messages] == [
        "prefill: 1 passes, 8 tokens", "sampling and the rest of steps: 0.00 s",
    ]  # fmt: skip


# ---------------------------------------------------------------- limits


def test_limits_are_measured_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring._measured.cache_clear()
    monkeypatch.setattr(measuring, "cpu_buffer_bytes", lambda: 2**20)
    monkeypatch.setattr(measuring, "_CPU_SIDE", 64)
    found = machine_limits(CPU, torch.float32)
    assert found.bytes_per_s > 1e6
    assert found.operations_per_s > 1e6
    assert found.upload_bytes_per_s == 0.0
    assert found.spread >= 1.0
    assert machine_limits(CPU, torch.float32) is found
    measuring._measured.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3])
def test_products_are_measured_in_every_dtype_that_there_is(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_CPU_SIDE", 64)
    monkeypatch.setattr(measuring, "_TRIAL_SIDE", 32)
    assert measuring.measure_products(CPU, dtype, 32).best > 1e4
    if dtype != E4M3:  # which no CPU is asked for
        assert measuring._measure_cpu_products(dtype).best > 1e4


@pytest.mark.parametrize(
    ("times_s", "wait_s", "spread"),
    [([0.01, 0.012, 0.011], 0.0, 1.1), ([0.02, 0.01, 0.03], 0.0, 2.0), ([0.01, 0.01, 0.01], 1.5, 4.0)],
)
def test_the_best_repeat_is_the_limit_and_how_far_it_can_be_off_is_told(
    times_s: list[float],
    wait_s: float,
    spread: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of two seconds on the test's clock a thread waits for its core for some of them."""
    caplog.set_level(logging.INFO)
    now_s, waits_s = itertools.count(), itertools.count(5.0, wait_s)
    monkeypatch.setattr(measuring, "run_times_s", lambda device, run, most_s: times_s)
    monkeypatch.setattr(measuring, "perf_counter", lambda: 2.0 * next(now_s))
    monkeypatch.setattr(measuring, "core_waits_s", lambda: {"1": 7.0, "2": next(waits_s)})
    monkeypatch.setattr(measuring, "cpu_buffer_bytes", lambda: 2**20)
    monkeypatch.setattr(measuring, "_CPU_SIDE", 100)
    measuring._measured.cache_clear()
    limits = measure_machine(CPU, "the CPU", torch.float32).limits
    measuring._measured.cache_clear()
    assert (limits.bytes_per_s, limits.operations_per_s) == pytest.approx((2**20 / 0.01, 2e6 / 0.01))
    assert limits.spread == pytest.approx(spread)
    first, *warnings = caplog.messages
    assert f"GFLOP/s of float32 products (spread {spread:.1f}, measured in " in first
    told = "limits were measured while others used the machine: shares of them may be off by as much"
    assert warnings == ([told] if spread > 1.5 else [])


def test_what_is_read_is_far_larger_than_the_caches_and_small_beside_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "available_memory_bytes", lambda: 2**40)
    assert cpu_buffer_bytes(tmp_path / "none") == 64 * 2**20
    for index, size in enumerate(("48K", "32M", "", "x")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n", encoding="ascii")
    assert cpu_buffer_bytes(tmp_path) == 128 * 2**20
    (tmp_path / "index1" / "size").write_text("1G", encoding="ascii")
    assert cpu_buffer_bytes(tmp_path) == 256 * 2**20
    monkeypatch.setattr(measuring, "available_memory_bytes", lambda: 2**30)
    assert cpu_buffer_bytes(tmp_path) == 128 * 2**20
