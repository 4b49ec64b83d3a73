"""Attention of prompts on a processor's registers for tiles, against sums in double precision of what was rounded."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.gpu_worker.attention.paged_cpu import PagedCpuAttention
from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.products.tiles import has_tile_loop
from services.gpu_worker.step_inputs import StepInputs
from tests.unit.gpu_worker.attention_case import (
    AttentionCase,
    Heads,
    check_broken_query,
    check_chunks_and_threads,
    slots_of,
    step_of_four_rows,
)

pytestmark = pytest.mark.skipif(not has_tile_loop(), reason="this processor has no registers for tiles")


def computed(case: AttentionCase) -> Tensor:
    """By the loops."""
    from services.gpu_worker.attention.tile_attention import TileAttention

    out = torch.full(case.queries.shape, math.nan)
    TileAttention(case.span(), case.pages, case.shape).attend(case.queries, case.keys, case.values, out)
    return out


@settings(max_examples=80, deadline=None)
@given(
    heads=st.sampled_from([(1, 1, 32), (3, 3, 64), (4, 2, 128), (7, 2, 64), (2, 1, 96)]),
    num_new=st.integers(1, 70) | st.sampled_from([96, 128, 161]),
    num_before=st.integers(0, 70) | st.sampled_from([256, 511]),
    page_size=st.sampled_from([1, 4, 16, 64]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_attention_on_tiles_is_that_of_rounded_numbers(
    heads: Heads, num_new: int, num_before: int, page_size: int, dtype: torch.dtype, spread: float, seed: int
) -> None:
    case = AttentionCase.random(heads, num_new, num_before, page_size, dtype, spread, seed)
    # Weights are rounded to 8 bits: each is off by 2^-9 of itself at most, and so is their average of the values.
    largest = float(case.values[case.values.isfinite()].abs().max())
    torch.testing.assert_close(computed(case).double(), case.expected(torch.bfloat16), rtol=0, atol=2**-8 * largest)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("num_threads", [1, 2, 3], indirect=True)
def test_a_token_is_the_same_whatever_the_chunk_and_however_many_threads() -> None:
    """Of a prompt computed at once and of the end of the same prompt, when its tokens fall on the same tiles."""
    check_chunks_and_threads(computed, 96, 32)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_smp_02_what_is_broken_stays_so_for_those_that_see_it(broken: float) -> None:
    case = AttentionCase.random((3, 2, 64), 64, 40, dtype=torch.float32)
    case.values[int(slots_of(case.pages, 16, case.length)[40 + 33])] = broken
    assert not computed(case)[33:].isfinite().any()


def test_a_broken_query_breaks_its_own_token() -> None:
    check_broken_query(computed)


def backend(rounds_prompts: bool = True) -> PagedCpuAttention:
    return PagedCpuAttention(torch.float32, computes_in=torch.float32, rounds_prompts=rounds_prompts)


@pytest.mark.parametrize("window", [None, 60, 150])
def test_rows_of_a_step_go_through_tiles_where_each_token_sees_all_before_it(window: int | None) -> None:
    """Beside a row that decodes and one too short to be worth it; the way without tiles gives nearly the same."""
    pool, inputs, queries = step_of_four_rows()
    tiled, plain = (attended(backend(rounds), inputs, pool, queries, window) for rounds in (True, False))
    torch.testing.assert_close(tiled, plain, rtol=0, atol=2**-6 * float(pool.values.abs().max()))
    ends = torch.tensor(inputs.query_lengths).cumsum(0).tolist()
    is_same = [torch.equal(tiled[begin:end], plain[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    assert is_same == [True, False, True, False]


def attended(
    attention: PagedCpuAttention, inputs: StepInputs, pool: KvCache, queries: Tensor, window: int | None
) -> Tensor:
    return attention.begin_step(inputs, pool).attend(0, queries.clone(), window)
