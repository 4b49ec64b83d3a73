"""The prefill chunk that warm-up chooses, on machines whose speed the test decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.random_checkpoints import write_checkpoint
from services.gpu_worker import warm_up as module
from services.gpu_worker.attention import attention_for
from services.gpu_worker.copy_watcher import CopyWatcher
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.warm_up import warm_up
from services.gpu_worker.weights import load_model
from services.model_files.source import open_model
from tests.sockets import wait_until

CPU = torch.device("cpu")


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    model = load_model(open_model(write_checkpoint(tmp_path / "tiny", "llama")), CPU)
    config = model.config
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
    return ModelRunner(config, model.weights, KvCache(shape, 0, CPU), attention_for(CPU, torch.float32))


class Machine:
    """Takes `fixed_s` a step, a second for each `tokens_per_s`, and more behind a context; its clock is the sum.

    Behind `doubling` tokens each takes twice as long.
    """

    def __init__(self, tokens_per_s: float, fixed_s: float = 0.01, doubling: float = math.inf) -> None:
        self.tokens_per_s, self.fixed_s, self.doubling, self.now_s = tokens_per_s, fixed_s, doubling, 0.0
        self.sizes: list[int] = []

    def run(self, runner: ModelRunner, num_tokens: int, context: int = 0) -> float:
        seconds = self.fixed_s + num_tokens / self.tokens_per_s * (1 + context / self.doubling)
        self.now_s += seconds
        self.sizes.append(num_tokens)
        return seconds


def measured_on(
    machine: Machine, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, chunk: int = 0, max_model_len: int = 4096
) -> module.WarmUp:
    monkeypatch.setattr(module, "_run", machine.run)
    monkeypatch.setattr(module, "perf_counter", lambda: machine.now_s)
    return warm_up(runner, lambda: None, max_model_len, chunk)


@pytest.mark.parametrize("tokens_per_s", [400, 1500, 6000, 20_000])
def test_the_chunk_runs_in_300_ms_on_a_cpu(
    tokens_per_s: float, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured_on(Machine(tokens_per_s), runner, monkeypatch)
    real_s = 0.01 + found.chunk_tokens / tokens_per_s
    assert 0.24 <= real_s <= 0.31
    assert found.chunk_s == pytest.approx(real_s, rel=0.2)
    assert found.chunk_tokens % 16 == 0


def test_a_slow_machine_keeps_a_chunk_worth_reading_the_weights_for(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(20)
    found = measured_on(machine, runner, monkeypatch)
    assert found.chunk_tokens == 64
    assert found.chunk_s == pytest.approx(3.21)
    assert len(machine.sizes) <= 3 + 1  # it is slow enough as it is


def test_a_fast_machine_has_an_upper_bound(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_on(Machine(10**7, 0.0), runner, monkeypatch).chunk_tokens == 8192


@pytest.mark.parametrize("chunk", [16, 64, 500])
def test_a_chunk_that_is_set_is_only_timed(chunk: int, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1500)
    found = measured_on(machine, runner, monkeypatch, chunk)
    assert found.chunk_tokens == chunk
    assert max(machine.sizes) == max(chunk, 64)
    assert found.chunk_context == 0


@pytest.mark.parametrize("max_model_len", [4096, 512])
def test_the_context_that_makes_a_token_twice_as_dear_is_found(
    max_model_len: int, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured_on(Machine(1500, 0.0, doubling=900), runner, monkeypatch, max_model_len=max_model_len)
    assert found.chunk_context == pytest.approx(900, abs=2)
    assert measured_on(Machine(1500, 0.0), runner, monkeypatch).chunk_context == 2**20


def test_where_no_context_fits_or_the_smallest_chunk_is_too_slow_none_is_looked_for(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured_on(Machine(1500, doubling=900), runner, monkeypatch, max_model_len=100).chunk_context == 0
    assert measured_on(Machine(20, doubling=900), runner, monkeypatch).chunk_context == 0
    slow = measured_on(Machine(100, 0.0, doubling=900), runner, monkeypatch)
    assert slow.chunk_tokens == 64
    assert slow.chunk_context == pytest.approx(900, abs=2)


def test_a_step_behind_a_context_runs_and_touches_the_dummy_page_alone(runner: ModelRunner) -> None:
    inputs = runner.dummy_inputs(40, 2, context=50)
    assert inputs.context_lengths == (70, 70)
    assert inputs.positions.tolist() == [*range(50, 70)] * 2
    assert set(inputs.page_table.flatten().tolist()) == {runner.kv_cache.dummy_page_id}
    assert inputs.page_table.shape == (2, 5)
    assert torch.isfinite(runner.forward(inputs)).all()


def test_it_pumps_between_steps_and_may_be_interrupted(runner: ModelRunner) -> None:
    calls = []

    def pump() -> None:
        calls.append(0)
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        warm_up(runner, pump, 4096)


def test_the_copy_watcher_wakes_once_for_each_step_also_when_the_device_fails() -> None:
    woken: list[int] = []
    watcher = CopyWatcher(lambda: woken.append(0))

    class Step:
        def __init__(self, wait: Callable[[], None]) -> None:
            self.wait_copied = wait

    def fail() -> None:
        raise RuntimeError("device lost")

    for wait in (lambda: None, fail, lambda: None):
        watcher.watch(Step(wait))
    wait_until(lambda: len(woken) == 3)
