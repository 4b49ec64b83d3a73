"""Decode steps that are replayed: padding touches nobody, results are those of a launched step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from services.gpu_worker.attention import attention_for
from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.decode_graphs import LARGEST_BATCH, GraphLimits, batch_sizes
from services.gpu_worker.graph_device import Recording
from services.gpu_worker.graph_warm_up import graph_device, record_graphs
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.step_inputs import StepInputs, build_step_inputs
from services.gpu_worker.weights import LoadedModel
from services.runtime.config import Settings
from services.runtime.service import StartError
from services.wire.request_params import SamplingParams
from tests.unit.gpu_worker.graph_cases import (
    MAX_LENGTH,
    Pair,
    check_padding,
    check_replay_is_eager,
    decode_rows,
    mixed_inputs,
    new_pair,
)
from tests.unit.gpu_worker.plan_writer import GREEDY, Request
from tests.unit.gpu_worker.recording_device import RecordableReference, RecordingDevice
from tests.unit.gpu_worker.step_bench import CPU, MAX_ROWS, new_bench

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def pair(model: LoadedModel) -> Pair:
    return new_pair(model, RecordableReference(), RecordingDevice(), 8)


def test_the_ladder_ends_at_the_largest_step() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(6) == (1, 2, 4, 6)
    assert batch_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert batch_sizes(27) == (1, 2, 4, 8, 16, 24, 27)
    assert batch_sizes(256) == (1, 2, 4, *range(8, 257, 8))
    assert batch_sizes(8192)[-3:] == (448, 480, LARGEST_BATCH)
    assert all(list(batch_sizes(n)) == sorted(set(batch_sizes(n))) for n in range(1, 600))


def test_gph_01_padding_writes_to_the_dummy_page_alone(pair: Pair) -> None:
    check_padding(pair, 8)


def test_gph_02_a_replayed_step_is_the_launched_one(pair: Pair) -> None:
    check_replay_is_eager(pair, 8, 1e-4)


def test_what_was_not_recorded_is_launched(pair: Pair) -> None:
    inputs = mixed_inputs()
    torch.testing.assert_close(pair.graphed.forward(inputs), pair.eager.forward(inputs))
    part = replace(_inputs_of(pair, 3), sample_indices=torch.tensor([2]))
    torch.testing.assert_close(pair.graphed.forward(part), pair.eager.forward(part))
    assert pair.device.num_replays == 0


def _inputs_of(pair: Pair, count: int) -> StepInputs:
    return build_step_inputs(decode_rows(count), pair.eager.kv_cache.shape.page_size, CPU)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plans_ahead", [0, 2])
def test_gph_02_answers_are_the_same_with_graphs_and_without(model: LoadedModel, seed: int, plans_ahead: int) -> None:
    """Whole courses of chunks, decodes and retractions, several plans ahead of their results."""
    outputs = []
    for has_graphs in (True, False):
        bench, device = new_bench(model, attention=RecordableReference()), RecordingDevice()
        if has_graphs:
            record_graphs(bench.runner, GraphLimits(MAX_ROWS, 128), device, lambda: None)
        requests = [Request(n, [7 * n + at for at in range(3 + n)], _sampling(n)) for n in range(5)]
        bench.run_any_course(requests, seed, plans_ahead)
        assert (device.num_replays > 3) == has_graphs
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]


def _sampling(number: int) -> SamplingParams:
    return GREEDY if number % 2 else SamplingParams(1.1, 0.9, 0, 0.0, number, 0)


def test_recording_says_how_it_goes_and_begins_with_the_largest(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gpu_worker.graph_warm_up._LOG_EVERY_S", 0.0)
    bench, device = new_bench(model, attention=RecordableReference()), RecordingDevice()
    pumped: list[int] = []
    with caplog.at_level("INFO"):
        record_graphs(bench.runner, GraphLimits(4, 16), device, lambda: pumped.append(device.num_recorded))
    assert pumped == [1, 2, 3]
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == [
        "CUDA graphs: 1 of 3 recorded, down to 4 rows",
        "CUDA graphs: 2 of 3 recorded, down to 2 rows",
        "CUDA graphs: 3 of 3 recorded, down to 1 rows",
        "CUDA graphs: 3 sizes up to 4 rows",
    ]


def test_prc_10_a_device_that_cannot_record_ends_the_start_with_one_line(model: LoadedModel) -> None:
    class Broken(RecordingDevice):
        def record(self, run: Callable[[], None]) -> Recording:
            raise torch.OutOfMemoryError("CUDA out of memory\nTried to allocate")

    bench = new_bench(model, attention=RecordableReference())
    with pytest.raises(StartError, match=r"cannot be recorded \(no memory\): --no-cuda-graphs serves without them"):
        record_graphs(bench.runner, GraphLimits(4, 16), Broken(), lambda: None)


def test_attention_that_reads_lengths_on_the_host_is_not_recorded(model: LoadedModel) -> None:
    for attention in (ReferenceAttention(), attention_for(CPU, torch.float32)):
        runner = _runner(model, attention)
        assert not runner.can_record_decode
        with pytest.raises(TypeError, match="cannot be recorded"):
            runner.record_decode(GraphLimits(4, MAX_LENGTH), RecordingDevice(), lambda size: None)


def test_on_a_cpu_nothing_is_recorded(model: LoadedModel) -> None:
    assert graph_device(Settings(), _runner(model, RecordableReference())) is None


def _runner(model: LoadedModel, attention: AttentionBackend) -> ModelRunner:
    return ModelRunner(model.config, model.weights, new_bench(model).kv_cache, attention)
