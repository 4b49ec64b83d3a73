"""Attention of prompts in float32, in a compiled loop, against sums in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.gpu_worker.attention.paged_cpu import PagedCpuAttention
from services.gpu_worker.cpu_loops import loops_problem
from tests.unit.gpu_worker.attention_case import (
    AttentionCase,
    Heads,
    check_broken_query,
    check_chunks_and_threads,
    slots_of,
    step_of_four_rows,
)

pytestmark = pytest.mark.skipif(bool(loops_problem()), reason=str(loops_problem()))


def computed(case: AttentionCase, window: int | None = None) -> Tensor:
    """By the loop."""
    from services.gpu_worker.attention.block_attention import BlockAttention

    out = torch.full(case.queries.shape, math.nan)
    row = BlockAttention(case.span(window), window, case.pages, case.shape)
    row.attend(case.queries, case.keys, case.values, out)
    return out


@settings(max_examples=100, deadline=None)
@given(
    heads=st.sampled_from([(1, 1, 16), (3, 3, 64), (4, 2, 128), (7, 2, 64), (2, 1, 80), (2, 2, 96)]),
    num_new=st.integers(1, 70) | st.sampled_from([96, 128, 161, 300]),
    num_before=st.integers(0, 110) | st.sampled_from([192, 511]),
    window=st.none() | st.integers(1, 120),
    page_size=st.sampled_from([1, 4, 16, 64]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_attention_in_blocks_is_that_of_a_plain_sum(
    heads: Heads, num_new: int, num_before: int, window: int | None, page_size: int, dtype: torch.dtype,
    spread: float, seed: int,
) -> None:  # fmt: skip
    case = AttentionCase.random(heads, num_new, num_before, page_size, dtype, spread, seed)
    largest = float(case.values[case.values.isfinite()].abs().max())
    # A score in float32 is off by some 1e-6 of its size, and so is its weight.
    allowed = 2e-6 * largest * max(1.0, 8 * spread)
    torch.testing.assert_close(
        computed(case, window).double(), case.expected(torch.float32, window), rtol=0, atol=allowed
    )


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("num_threads", [1, 2, 3], indirect=True)
def test_a_token_is_the_same_whatever_the_chunk_and_however_many_threads() -> None:
    check_chunks_and_threads(computed, 230, 97)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_smp_02_what_is_broken_stays_so_for_those_that_see_it(broken: float) -> None:
    case = AttentionCase.random((3, 2, 64), 64, 140, dtype=torch.float32)
    slot = int(slots_of(case.pages, 16, case.length)[140 + 33])
    clean = computed(case)
    case.values[slot] = broken
    assert not computed(case)[33:].isfinite().any()
    assert torch.equal(computed(case)[:32], clean[:32])
    case.values[slot], case.keys[slot] = 0, math.nan
    assert computed(case)[33:].isnan().all()


def test_a_broken_query_breaks_its_own_token() -> None:
    check_broken_query(computed)


def test_what_lies_before_all_windows_is_not_looked_at() -> None:
    case = AttentionCase.random((2, 1, 32), 20, 200, dtype=torch.float32)
    expected = computed(case, 50)
    case.values[slots_of(case.pages, 16, 200 - 50 + 1)] = math.nan
    assert torch.equal(computed(case, 50), expected)


@pytest.mark.parametrize("window", [None, 60, 150])
def test_rows_of_a_step_go_through_the_loop_as_the_plain_way_computes_them(window: int | None) -> None:
    """Beside a row that decodes."""
    pool, inputs, queries = step_of_four_rows()
    in_loops, plain = (
        PagedCpuAttention(torch.float32, uses_loops=uses_loops).begin_step(inputs, pool).attend(0, queries, window)
        for uses_loops in (True, False)
    )
    torch.testing.assert_close(in_loops, plain, rtol=1e-5, atol=1e-5)
    assert not torch.equal(in_loops, plain)
