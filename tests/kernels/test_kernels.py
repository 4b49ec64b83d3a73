"""Every kernel, interpreted, gives what the plain way gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.device import kernel_cases
from bench.device.kernel_cases import TOLERANCES, AttentionCase, GroupedCase, RotaryCase, difference
from services.gpu_worker.kernels.expert_steps import FusedExpertSteps
from services.gpu_worker.kernels.grouped_choice import suits_torch, torch_or_ours
from services.gpu_worker.kernels.grouped_product import most_tiles, tile_rows
from services.gpu_worker.models.config import ExpertConfig
from services.gpu_worker.models.expert_steps import PlainExpertSteps

# The interpreter makes Python numbers of arrays with one element, which the next numpy refuses.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", list(kernel_cases.attention_cases()), ids=str)
def test_attention_is_that_of_the_reference(case: AttentionCase) -> None:
    found, expected = kernel_cases.attention_results(case, CPU)
    assert difference(found, expected) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", list(kernel_cases.grouped_cases()), ids=str)
def test_a_product_with_all_experts_is_one_with_each(case: GroupedCase) -> None:
    found, expected = kernel_cases.grouped_results(case, CPU)
    assert difference(found, expected) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_chosen"), [(1, 8, 2), (5, 6, 3), (20, 3, 3)])
def test_steps_around_products_with_experts_are_the_plain_ones(
    num_tokens: int, num_experts: int, num_chosen: int, dtype: torch.dtype
) -> None:
    """Experts that nobody chooses, or all do; numbers of them that are powers of two, and not."""
    experts = ExpertConfig(num_experts, num_chosen, 8, num_chosen % 2 == 0, (True,))
    for found, expected in kernel_cases.expert_step_results(num_tokens, experts, dtype, CPU):
        assert found.dtype == expected.dtype
        assert difference(found, expected) < (TOLERANCES[dtype] if found.is_floating_point() else 0.5)


def test_more_choices_than_a_program_looks_at_in_one_go_are_sorted() -> None:
    experts = torch.randint(0, 5, (300, 4), generator=torch.Generator().manual_seed(15))
    found, expected = (steps.group(experts, 6) for steps in (FusedExpertSteps(), PlainExpertSteps()))
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.places, expected.places)
    assert torch.equal(found.ends, expected.ends)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_token_that_is_not_finite_gets_experts_that_there_are() -> None:
    logits = torch.randn(3, 6)
    logits[1] = float("nan")
    routing = FusedExpertSteps().route(logits, ExpertConfig(6, 2, 8, True, (True,)))
    assert routing.experts.min() >= 0
    assert routing.experts.max() < 6
    assert routing.shares[1].isnan().all()
    assert routing.shares[[0, 2]].isfinite().all()


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=20).filter(any))
def test_a_product_with_experts_has_a_program_for_every_tile(counts: list[int]) -> None:
    row_block = tile_rows(sum(counts), len(counts))
    needed = sum(-(-count // row_block) for count in counts)
    assert needed <= most_tiles(sum(counts), len(counts), row_block) <= needed + len(counts)


@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (1000, torch.bfloat16), (576, torch.float32)])
def test_rows_are_rounded_to_8_bits_as_the_plain_way_does(width: int, dtype: torch.dtype) -> None:
    found, expected = kernel_cases.rounding_results(3, width, dtype, CPU)
    assert (found != expected).float().mean() < 0.005
    torch.testing.assert_close(found, expected, rtol=0.13, atol=1e-6)


def test_torchs_product_with_experts_is_ours_and_taken_for_many_rows() -> None:
    case = GroupedCase((130, 0, 190), 64, 48, torch.bfloat16)
    x, stack, ends = kernel_cases.grouped_inputs(case, CPU)
    assert suits_torch(len(x), stack.shape)
    assert not suits_torch(len(x), (6, 48, 64))
    assert not suits_torch(len(x), (3, 44, 64))
    assert not suits_torch(len(x), (3, 48, 60))
    expected = kernel_cases.grouped_results(case, CPU)[1]
    assert difference(torch_or_ours(x, stack, ends), expected) < TOLERANCES[case.dtype]
    few = ends.clamp(max=40)
    assert difference(torch_or_ours(x[:40], stack, few), expected[:40]) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", list(kernel_cases.rotary_cases()), ids=str)
def test_rotation_and_write_are_the_plain_ones(case: RotaryCase) -> None:
    for found, expected in kernel_cases.rotary_results(case, CPU):
        assert difference(found, expected) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (3, 576), (2, 1000)])
def test_sum_norm_and_gate_are_the_plain_ones(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    for found, expected in kernel_cases.norm_results(num_tokens, width, dtype, CPU):
        assert difference(found, expected) < TOLERANCES[dtype]
    assert difference(*kernel_cases.gated_results(num_tokens, width, dtype, CPU)) < TOLERANCES[dtype]
