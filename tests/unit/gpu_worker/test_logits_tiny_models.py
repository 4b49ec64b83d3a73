"""Logits of every family against transformers, however the tokens are cut into steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.attention.paged_cpu import PagedCpuAttention
from services.gpu_worker.attention.paged_cuda import PagedCudaAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.weights import LoadedModel, load_model
from services.model_files.source import open_model
from tests.unit.gpu_worker.step_driver import Row, StepDriver
from tests.unit.gpu_worker.tiny_models import CONFIGS, VOCAB_SIZE, WINDOW, TinyModel, make_tiny_model

CPU = torch.device("cpu")
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "paged_cpu": lambda: PagedCpuAttention(torch.float32),
    "padded_blocks": lambda: PagedCudaAttention(max_block_elements=4096),
}

Subject = tuple[TinyModel, LoadedModel]


@pytest.fixture(scope="module", params=CONFIGS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    tiny = make_tiny_model(request.param, tmp_path_factory.mktemp("tiny"))
    return tiny, load_model(open_model(tiny.folder), CPU)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return BACKENDS[request.param]()


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def assert_agrees(row: Row, tiny: TinyModel) -> None:
    computed = row.all_logits()
    expected = tiny.logits(row.token_ids[: row.num_computed_tokens])[-len(computed) :]
    assert computed.dtype == torch.float32
    assert largest_difference(computed, expected) < 1e-4


def largest_difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize("page_size", [1, 16])
def test_whole_prompt_then_decode(subject: Subject, backend: AttentionBackend, page_size: int) -> None:
    driver = StepDriver(subject[1], backend, page_size, 64)
    row = driver.add(prompt(1, 40))
    driver.step((row, 33))
    for _ in range(7):
        driver.step((row, 1))
    assert_agrees(row, subject[0])


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_chunks_of_a_prompt(subject: Subject, backend: AttentionBackend, page_size: int) -> None:
    driver = StepDriver(subject[1], backend, page_size, 64)
    row = driver.add(prompt(2, 45))
    for num_new in (1, 5, 16, 2, 17, 1, 3):
        driver.step((row, num_new))
    assert_agrees(row, subject[0])


@pytest.mark.parametrize("page_size", [1, 16])
def test_cached_prefix(subject: Subject, backend: AttentionBackend, page_size: int) -> None:
    driver = StepDriver(subject[1], backend, page_size, 160)
    first = driver.add(prompt(3, 40))
    driver.step((first, 40))
    second = driver.add(first.token_ids[:37] + prompt(4, 20), prefix_of=first)
    assert second.num_computed_tokens == 37 // page_size * page_size
    driver.step((second, 57 - second.num_computed_tokens))
    # The whole prompt is in the cache: one token is computed all the same.
    third = driver.add(first.token_ids[:33], prefix_of=first)
    driver.step((third, 33 - third.num_computed_tokens))
    assert third.num_computed_tokens == 33
    assert_agrees(second, subject[0])
    assert_agrees(third, subject[0])


@pytest.mark.parametrize("page_size", [1, 16])
def test_prefill_and_decode_of_many_rows_in_one_pass(
    subject: Subject, backend: AttentionBackend, page_size: int
) -> None:
    driver = StepDriver(subject[1], backend, page_size, 300)
    rows = [driver.add(prompt(10 + index, length)) for index, length in enumerate((50, 3, 1, 24, 41))]
    driver.step((rows[0], 30), (rows[1], 1), (rows[3], 2))
    driver.step((rows[3], 1), (rows[0], 1), (rows[4], 9), (rows[1], 1))
    driver.step((rows[4], 1), (rows[0], 1), (rows[1], 1), (rows[3], 1))
    driver.step((rows[2], 1), (rows[0], 18), (rows[4], 31), (rows[3], 20))
    for row in rows:
        assert row.num_computed_tokens == len(row.token_ids)
        assert_agrees(row, subject[0])


def test_a_dummy_step_touches_the_dummy_page_only(subject: Subject) -> None:
    driver = StepDriver(subject[1], PagedCpuAttention(torch.float32), 4, 64)
    inputs = driver.runner.dummy_inputs(num_tokens=20, num_rows=3)
    assert inputs.query_lengths == (7, 7, 6)
    assert driver.runner.forward(inputs).shape == (3, VOCAB_SIZE)
    for pool in (driver.kv_cache.keys, driver.kv_cache.values):
        assert not pool[:, :-1].any()
        assert pool[:, -1].any()


def test_a_dummy_step_needs_no_pool(subject: Subject) -> None:
    driver = StepDriver(subject[1], PagedCpuAttention(torch.float32), 16, num_tokens=0)
    assert driver.runner.forward(driver.runner.dummy_inputs(40, 2)).isfinite().all()
    with pytest.raises(ValueError, match="cannot be spread"):
        driver.runner.dummy_inputs(num_tokens=2, num_rows=3)


def test_a_step_in_which_no_row_samples(subject: Subject) -> None:
    driver = StepDriver(subject[1], PagedCpuAttention(torch.float32), 16, 64)
    row = driver.add(prompt(7, 30))
    part = StepRow(row.token_ids[:20], 0, row.page_ids, samples=False)
    assert driver.runner.forward(build_step_inputs([part], 16, CPU)).shape == (0, VOCAB_SIZE)
    row.num_computed_tokens = 20
    driver.step((row, 10))
    assert_agrees(row, subject[0])


@pytest.mark.parametrize("name", ["mistral", "qwen2-window-yarn"])
def test_the_window_makes_a_difference(name: str, tmp_path: Path) -> None:
    """A control: without its window the same model gives the same logits within one window, and others after it."""
    tiny = make_tiny_model(name, tmp_path)
    model = load_model(open_model(tmp_path), CPU)
    assert WINDOW in model.config.windows
    assert model.config.windows == ((WINDOW,) * 3 if name == "mistral" else (None, WINDOW, WINDOW))
    unlimited = tiny.model
    unlimited.config.sliding_window = None
    unlimited.config.layer_types = ["full_attention"] * 3
    driver = StepDriver(model, ReferenceAttention(), 16, 64)
    row = driver.add(prompt(5, 40))
    driver.step((row, 40))
    rebuilt = type(unlimited)(unlimited.config).eval()
    rebuilt.load_state_dict(unlimited.state_dict())
    with torch.inference_mode():
        expected = rebuilt(torch.tensor([row.token_ids])).logits[0]
    assert largest_difference(row.all_logits()[:WINDOW], expected[:WINDOW]) < 1e-4
    assert largest_difference(row.all_logits()[-1:], expected[-1:]) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_half_precisions_are_as_close_to_float32_as_those_of_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny = make_tiny_model(name, tmp_path, dtype)
    model = load_model(open_model(tmp_path), CPU, dtype)
    token_ids = prompt(6, 30)
    theirs = tiny.logits(token_ids).float()
    tiny.model.float()
    exact = tiny.logits(token_ids)
    for make in (ReferenceAttention, lambda: PagedCpuAttention(dtype), PagedCudaAttention):
        driver = StepDriver(model, make(), 4, 64)
        row = driver.add(token_ids)
        driver.step((row, 20))
        for _ in range(10):
            driver.step((row, 1))
        assert root_mean_square(row.all_logits() - exact) < 1.2 * root_mean_square(theirs - exact)


def root_mean_square(difference: Tensor) -> float:
    return float(difference.square().mean().sqrt())
