"""Layers of experts: how tokens are routed, one expert after another and all at once, in forms and in recordings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from bench.random_checkpoints import write_checkpoint
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.fit_check import activation_bytes
from services.gpu_worker.models.config import ExpertConfig
from services.gpu_worker.models.expert_steps import PlainExpertSteps, Routing
from services.gpu_worker.models.expert_weights import Expert, ExpertStacks
from services.gpu_worker.models.feed_forward import mixed_at_once, mixed_one_by_one, route
from services.gpu_worker.models.operators import PlainOperators
from services.gpu_worker.models.projection import DenseProjection
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.weights import LoadedModel, grids_in, laid_out_bytes, load_laid_out, load_model
from services.model_files.source import open_model
from services.runtime.config import Settings
from tests.unit.gpu_worker.graph_cases import check_padding, check_replay_is_eager, new_pair
from tests.unit.gpu_worker.recording_device import RecordableReference, RecordingDevice
from tests.unit.gpu_worker.step_bench import CPU
from tests.unit.gpu_worker.step_driver import StepDriver
from tests.unit.gpu_worker.test_weights_gguf import write_as_gguf
from tests.unit.gpu_worker.tiny_models import TinyModel, make_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = ExpertConfig(num_experts=6, num_chosen=2, intermediate_size=24, normalizes_shares=True, in_layers=(True,))
HIDDEN_SIZE = 16


def plain_product(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """A `GroupedProduct` that nothing waits for: every row by every matrix, and of these the row's own."""
    everything = torch.einsum("nk,emk->nem", x, stack)
    expert = torch.searchsorted(ends, torch.arange(len(x), dtype=torch.int32), right=True)
    return everything[torch.arange(len(x)), expert]


@pytest.fixture
def stacks() -> ExpertStacks:
    torch.manual_seed(5)
    width = CONFIG.intermediate_size
    gate_up, down = torch.randn(6, 2 * width, HIDDEN_SIZE), torch.randn(6, HIDDEN_SIZE, width)
    return ExpertStacks(gate_up, down, plain_product)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("qwen3_moe-dense-layer", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "qwen3_moe", "qwen3_moe")
    return load_model(open_model(folder), CPU)


def at_once(model: LoadedModel) -> LoadedModel:
    return replace(model, weights=model.weights.with_grouped_product(plain_product, PlainExpertSteps()))


@pytest.mark.parametrize("normalizes", [False, True])
def test_the_likeliest_experts_get_the_shares_of_a_softmax_over_all(normalizes: bool) -> None:
    x, router = torch.randn(5, HIDDEN_SIZE), torch.randn(6, HIDDEN_SIZE)
    routing = route(x, router, replace(CONFIG, normalizes_shares=normalizes))
    for token, (experts, shares) in enumerate(zip(routing.experts, routing.shares, strict=True)):
        probabilities = torch.softmax(router @ x[token], dim=0)
        expected = sorted(range(6), key=lambda expert, p=probabilities: -float(p[expert]))[:2]  # type: ignore[misc]
        assert experts.tolist() == expected
        whole = probabilities[expected].sum() if normalizes else 1.0
        torch.testing.assert_close(shares, probabilities[expected] / whole)


def test_shares_are_computed_in_float32_and_rounded_once() -> None:
    x, router = torch.randn(5, HIDDEN_SIZE).bfloat16(), torch.randn(6, HIDDEN_SIZE).bfloat16()
    logits = torch.nn.functional.linear(x, router).float()
    top = logits.softmax(-1).topk(2).values
    routing = route(x, router, CONFIG)
    assert torch.equal(routing.shares, (top / top.sum(-1, keepdim=True)).bfloat16())


@pytest.mark.parametrize("experts", [[[0, 1]], [[3, 0], [3, 5], [0, 3], [3, 1]], [[4, 5]] * 7])
def test_all_at_once_is_one_after_another(stacks: ExpertStacks, experts: list[list[int]]) -> None:
    assert stacks.product is not None
    chosen = torch.tensor(experts)
    routing = Routing(chosen, torch.rand(chosen.shape))
    x = torch.randn(len(chosen), HIDDEN_SIZE)
    each = tuple(
        Expert(DenseProjection(gate_up), DenseProjection(down))
        for gate_up, down in zip(stacks.gate_up, stacks.down, strict=True)
    )
    expected = mixed_one_by_one(x, each, routing, PlainOperators())
    found = mixed_at_once(x, stacks, stacks.product, routing, PlainOperators())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_choices_of_one_token_do_not_touch_another(stacks: ExpertStacks) -> None:
    """A row that is not finite stays alone."""
    assert stacks.product is not None
    x = torch.randn(3, HIDDEN_SIZE)
    routing = Routing(torch.tensor([[0, 1], [1, 2], [0, 2]]), torch.rand(3, 2))
    expected = mixed_at_once(x, stacks, stacks.product, routing, PlainOperators())
    x[1] = float("nan")
    found = mixed_at_once(x, stacks, stacks.product, routing, PlainOperators())
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])


def test_greedy_text_is_that_of_transformers_either_way(tiny: TinyModel) -> None:
    one_by_one = load_model(open_model(tiny.folder), CPU)
    assert one_by_one.config.experts is not None
    assert one_by_one.config.experts.in_layers == (True, True, False)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = list(prompt)
    for _ in range(10):
        expected.append(int(tiny.logits(expected)[-1].argmax()))
    for loaded in (one_by_one, at_once(one_by_one)):
        driver = StepDriver(loaded, ReferenceAttention(), 4, 32)
        assert driver.greedy(prompt, 10) == expected[len(prompt) :]


def test_the_experts_of_a_layer_are_parts_of_two_stacks(model: LoadedModel) -> None:
    dense, *others = model.weights.layers
    assert dense.experts is None
    for layer in others:
        assert layer.experts is not None
        assert layer.experts.stacks is not None
        assert layer.gate_up is layer.down is None
        for number, expert in enumerate(layer.experts.experts):
            assert expert.gate_up.weight.data_ptr() == layer.experts.stacks.gate_up[number].data_ptr()
            assert expert.down.weight.data_ptr() == layer.experts.stacks.down[number].data_ptr()
    assert model.weights.num_bytes == model.report.num_bytes_placed


def test_decode_is_recorded_where_experts_are_multiplied_at_once(model: LoadedModel) -> None:
    check_padding(new_pair(at_once(model), RecordableReference(), RecordingDevice(), 4), 4)
    check_replay_is_eager(new_pair(at_once(model), RecordableReference(), RecordingDevice(), 4), 4, 1e-4)


def test_experts_one_after_another_are_not_recorded(model: LoadedModel) -> None:
    with pytest.raises(TypeError, match="experts that are multiplied one after another cannot be recorded"):
        new_pair(model, RecordableReference(), RecordingDevice(), 4)
    assert not StepDriver(model, RecordableReference(), 4, 8).runner.can_record_decode
    assert StepDriver(at_once(model), RecordableReference(), 4, 8).runner.can_record_decode


@pytest.mark.parametrize("is_exact", [True, False])
def test_each_expert_is_laid_out_by_itself(tiny: TinyModel, tmp_path: Path, is_exact: bool) -> None:
    """Of a file in 4 bits: the expert's own codes reach its form, and memory is what was expected."""
    path = write_as_gguf(tiny, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_1)
    plain = load_model(open_model(path), CPU)
    forms = CpuForms(is_exact, copy_bytes=0)
    laid_out = load_laid_out(open_model(path), forms)
    expected_bytes = laid_out_bytes(plain.config, CpuForms(is_exact, copy_bytes=0), grids_in(open_model(path)))
    assert laid_out.weights.num_bytes <= expected_bytes
    for mine, theirs in zip(laid_out.weights.layers[:2], plain.weights.layers[:2], strict=True):
        assert mine.experts is not None
        assert theirs.experts is not None
        assert mine.experts.stacks is None
        assert torch.equal(mine.experts.router, theirs.experts.router)
        for ours, dense in zip(mine.experts.experts, theirs.experts.experts, strict=True):
            x = torch.randn(1, 64)
            expected = dense.gate_up(x)
            error = (ours.gate_up(x) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
            assert float(error) < (1e-5 if is_exact else 0.01)


def test_a_step_takes_room_for_each_expert_that_a_token_goes_through(model: LoadedModel) -> None:
    assert model.config.experts is not None
    settings = Settings(max_running_requests=1)
    many = replace(model.config, experts=replace(model.config.experts, num_chosen=8))
    more = activation_bytes(settings, many, torch.float32, 100) - activation_bytes(
        settings, model.config, torch.float32, 100
    )
    assert more == 100 * 4 * 6 * (3 * 32 + 3 * 64)
