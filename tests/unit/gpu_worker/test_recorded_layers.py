"""Layers of decode steps that are replayed from a recording of compiled loops: what they compute, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.attention.paged_cpu import FEW_TOKENS, PagedCpuAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.decode_graphs import GraphLimits
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.models.operators import Operators, PlainOperators
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.products.grid import has_grid_loop
from services.gpu_worker.products.quantized_forms import QuantizedForms
from services.gpu_worker.recorded_layers import SIZES
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.weights import LoadedModel, RunnableModel, check_model, load_laid_out
from services.model_files.source import open_model
from tests.unit.gpu_worker.graph_cases import (
    MAX_LENGTH,
    NUM_PAGES,
    PAGE_SIZE,
    Pair,
    check_padding,
    check_replay_is_eager,
    decode_rows,
)
from tests.unit.gpu_worker.recording_device import RecordingDevice
from tests.unit.gpu_worker.step_bench import CPU
from tests.unit.gpu_worker.tiny_models import CONFIGS, make_tiny_model

pytestmark = pytest.mark.skipif(not has_grid_loop(), reason="this processor has no instructions for the loops")
MOST_ROWS = FEW_TOKENS


def in_codes(name: str, folder: Path) -> RunnableModel:
    """A tiny model whose every matrix is codes."""
    make_tiny_model(name, folder)
    files = open_model(folder)
    return load_laid_out(files, QuantizedForms(CpuForms(is_exact=False, copy_bytes=0), check_model(files), 4))


def runner_of(
    model: RunnableModel | LoadedModel,
    attention: AttentionBackend | None = None,
    operators: Operators | None = None,
    kv_dtype: torch.dtype = torch.float32,
) -> ModelRunner:
    config = model.config
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, kv_dtype)
    return ModelRunner(
        config,
        model.weights,
        KvCache(shape, NUM_PAGES, CPU),
        attention or PagedCpuAttention(kv_dtype, computes_in=torch.float32),
        operators or operators_for(CPU),
    )


def recorded_pair(model: RunnableModel, monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype = torch.float32) -> Pair:
    """Two runners over pools of the same numbers; the second replays, which its device counts."""
    pair = Pair(runner_of(model, kv_dtype=kv_dtype), runner_of(model, kv_dtype=kv_dtype), RecordingDevice())
    mark = torch.randn(pair.eager.kv_cache.keys.shape, generator=torch.Generator().manual_seed(4))
    for runner in (pair.eager, pair.graphed):
        runner.kv_cache.keys.copy_(mark)
        runner.kv_cache.values.copy_(mark.flip(0))
    recorded = pair.graphed.record_layers(GraphLimits(1, MAX_LENGTH), lambda: None)
    assert recorded is not None
    assert recorded.most_rows == MOST_ROWS
    run = recorded.run

    def counted(inputs: object) -> Tensor:
        pair.device.num_replays += 1
        return run(inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(recorded, "run", counted)
    return pair


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize(
    ("name", "num_threads"),
    [("llama", 2), ("qwen3-biases", 2), *((name, 1) for name in CONFIGS if "moe" not in name)],
    indirect=["num_threads"],
)
def test_replayed_layers_are_the_launched_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = recorded_pair(in_codes(name, tmp_path), monkeypatch)
    check_padding(pair, MOST_ROWS)
    pair.eager.kv_cache.keys.copy_(pair.graphed.kv_cache.keys)
    pair.eager.kv_cache.values.copy_(pair.graphed.kv_cache.values)
    check_replay_is_eager(pair, MOST_ROWS, 0.0)
    for lengths in ((3, 1), (1, 2, 1), (8,), (5, 3)):
        check_new_tokens(pair, lengths, is_replayed=True)
    for lengths in ((9,), (1, 1, 8)):
        check_new_tokens(pair, lengths, is_replayed=False)


def check_new_tokens(pair: Pair, lengths: tuple[int, ...], is_replayed: bool) -> None:
    """A step whose rows have so many new tokens behind three computed ones."""
    rows = [
        StepRow([*range(10 * row, 10 * row + count)], 3, [3 * row + 1, 3 * row, 3 * row + 2], samples=True)
        for row, count in enumerate(lengths)
    ]
    inputs = build_step_inputs(rows, PAGE_SIZE, CPU)
    num_replays = pair.device.num_replays
    assert torch.equal(pair.graphed.hidden(inputs), pair.eager.hidden(inputs))
    assert pair.device.num_replays - num_replays == is_replayed


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_the_pool_gets_the_same_numbers(kv_dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = recorded_pair(in_codes("qwen3", tmp_path), monkeypatch, kv_dtype)
    for count in (5, 2, 7, 8, 1):
        pair.step(decode_rows(count, count))
    used = NUM_PAGES  # the dummy page is padding's
    assert torch.equal(pair.graphed.kv_cache.keys[:, :used], pair.eager.kv_cache.keys[:, :used])
    assert torch.equal(pair.graphed.kv_cache.values[:, :used], pair.eager.kv_cache.values[:, :used])


def test_what_is_not_made_of_loops_is_not_recorded(tmp_path: Path) -> None:
    limits = GraphLimits(MOST_ROWS, MAX_LENGTH)
    model = in_codes("llama", tmp_path / "codes")
    assert runner_of(model, attention=ReferenceAttention()).record_layers(limits, lambda: None) is None
    assert runner_of(model, operators=PlainOperators()).record_layers(limits, lambda: None) is None
    make_tiny_model("llama", tmp_path / "plain")
    exact = load_laid_out(open_model(tmp_path / "plain"), CpuForms(is_exact=True))
    runner = runner_of(exact)
    assert runner.record_layers(limits, lambda: None) is None
    assert runner.forward(build_step_inputs(decode_rows(2), PAGE_SIZE, CPU)).isfinite().all()


def test_experts_are_not_recorded(tmp_path: Path) -> None:
    model = in_codes("qwen3_moe", tmp_path)
    assert runner_of(model).record_layers(GraphLimits(MOST_ROWS, MAX_LENGTH), lambda: None) is None


def test_what_rows_of_a_few_tokens_can_come_to_is_recorded(tmp_path: Path) -> None:
    pumped: list[int] = []
    recorded = runner_of(in_codes("llama", tmp_path)).record_layers(GraphLimits(5, 12), lambda: pumped.append(1))
    assert recorded is not None
    assert recorded.most_rows == 5 * FEW_TOKENS
    assert len(pumped) == SIZES.index(40) + 1


@pytest.mark.skipif(bool(loops_problem()), reason=str(loops_problem()))
def test_memory_is_lent_again_when_no_tensor_looks_into_it() -> None:
    from services.gpu_worker.cpu_loops.recording import NotRecordableError, record
    from services.gpu_worker.cpu_loops.team import TEAM

    assert TEAM is not None
    places: list[int] = []

    def run() -> Tensor:
        first = torch.empty(4, 6)
        view = first.view(6, 4)[2:]
        places.append(first.data_ptr())
        del first
        second = torch.empty(4, 6)  # the first one's memory is still looked into
        places.append(second.data_ptr())
        del view
        third = torch.empty(24)
        places.append(third.data_ptr())
        return second

    _, kept = record(TEAM, run)
    first, second, third = places[-3:]
    assert first != second
    assert first == third
    assert kept.data_ptr() == second
    with pytest.raises(NotRecordableError, match="add"):
        record(TEAM, lambda: torch.empty(2) + torch.empty(2))
    with pytest.raises(NotRecordableError, match="zero_"):
        record(TEAM, lambda: torch.empty(2).zero_())


@pytest.mark.skipif(bool(loops_problem()), reason=str(loops_problem()))
def test_recording_does_not_load_the_compiler_of_torch() -> None:
    """Torch wraps the method of a mode in something that loads it, unless the mode says that it need not."""
    from services.gpu_worker.cpu_loops import recording

    (mode,) = (
        cls
        for cls in vars(recording).values()
        if isinstance(cls, type) and "__torch_dispatch__" in vars(cls) and cls.__module__ == recording.__name__
    )
    assert not hasattr(vars(mode)["__torch_dispatch__"], "__wrapped__")
