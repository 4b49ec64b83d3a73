"""Decode recorded and replayed with our kernels: what holds of graphs with the plain attention holds with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from bench.random_checkpoints import Shape, write_checkpoint
from services.gpu_worker.attention.paged_triton import PagedTritonAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.kernels.expert_steps import FusedExpertSteps
from services.gpu_worker.kernels.grouped_product import grouped_product
from services.gpu_worker.kernels.operators import FusedOperators
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.models.operators import PlainOperators
from services.gpu_worker.weights import LoadedModel, load_model
from services.model_files.source import open_model
from tests.unit.gpu_worker.graph_cases import (
    CPU,
    PAGE_SIZE,
    Pair,
    check_padding,
    check_replay_is_eager,
    mixed_inputs,
    new_pair,
)
from tests.unit.gpu_worker.recording_device import Recorded, RecordingDevice

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

_SHAPE = Shape(num_layers=2)
_MAX_ROWS = 4


@contextmanager
def launches_too(recorded: Recorded) -> Iterator[None]:
    """Records launches of kernels; what the interpreter itself asks of torch is no part of them."""
    run = InterpretedFunction.run

    def recording(self: Any, *arguments: object, **options: object) -> None:
        def launch() -> None:
            with _disable_current_modes():
                run(self, *arguments, **options)

        launch()
        recorded.calls.append(launch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", recording)
        yield


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    return load_model(open_model(write_checkpoint(tmp_path / "tiny", "qwen3", _SHAPE)), CPU)


@pytest.fixture
def with_experts(tmp_path: Path) -> LoadedModel:
    return load_model(open_model(write_checkpoint(tmp_path / "experts", "qwen3_moe", _SHAPE)), CPU)


@pytest.fixture
def pair(model: LoadedModel) -> Pair:
    return new_pair(model, PagedTritonAttention(4), RecordingDevice(also=launches_too), _MAX_ROWS, FusedOperators())


def test_gph_01_padding_writes_to_the_dummy_page_alone(pair: Pair) -> None:
    check_padding(pair, _MAX_ROWS)


def test_gph_02_a_replayed_step_is_the_launched_one(pair: Pair) -> None:
    check_replay_is_eager(pair, _MAX_ROWS, 1e-4)


@pytest.mark.parametrize("name", ["model", "with_experts"])
def test_a_model_of_kernels_is_the_plain_model(name: str, request: pytest.FixtureRequest) -> None:
    """A chunk and a decode, through norms, rotation, attention, gate and products with experts of our own."""
    model: LoadedModel = request.getfixturevalue(name)
    logits = []
    for attention, operators in ((PagedTritonAttention(4), FusedOperators()), (ReferenceAttention(), PlainOperators())):
        config = model.config
        shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, torch.float32)
        is_plain = isinstance(operators, PlainOperators)
        weights = model.weights if is_plain else model.weights.with_grouped_product(grouped_product, FusedExpertSteps())
        runner = ModelRunner(config, weights, KvCache(shape, 10, CPU), attention, operators)
        logits.append(runner.forward(mixed_inputs()))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
