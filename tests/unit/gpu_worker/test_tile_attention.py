"""Attention of prompts on a processor's registers for tiles, against sums in double precision of what was rounded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.attention.paged_cpu import PagedCpuAttention
from services.gpu_worker.attention.row_span import RowSpan
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.products.tiles import has_tile_loop
from services.gpu_worker.step_inputs import StepInputs, StepRow, build_step_inputs

pytestmark = pytest.mark.skipif(not has_tile_loop(), reason="this processor has no registers for tiles")
CPU = torch.device("cpu")
Heads = tuple[int, int, int]
"""Query heads for each key/value head, key/value heads, their width."""


@dataclass(frozen=True)
class Case:
    """A row: its queries [num_new, num_heads, dim], and a pool that holds its tokens in pages that lie anywhere."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    pages: Tensor
    shape: KvCacheShape
    length: int

    @classmethod
    def random(
        cls, heads: Heads, num_new: int, num_before: int, page_size: int = 16, dtype: torch.dtype = torch.float16,
        spread: float = 1.0, seed: int = 0,
    ) -> Case:  # fmt: skip
        """All of the pool that is not the row's is NaN."""
        group, num_kv_heads, dim = heads
        generator = torch.Generator().manual_seed(seed)
        length = num_before + num_new
        num_pages = -(-length // page_size)
        pages = torch.randperm(num_pages + 3, generator=generator)[:num_pages]
        shape = KvCacheShape(1, num_kv_heads, dim, page_size, dtype)
        pools = [torch.full(((num_pages + 3) * page_size, num_kv_heads, dim), math.nan) for _ in range(2)]
        slots = slots_of(pages, page_size, length)
        for pool in pools:
            pool[slots] = spread * torch.randn(length, num_kv_heads, dim, generator=generator)
        heads_and_more = torch.randn(num_new, group * num_kv_heads + 2, dim, generator=generator)
        keys, values = (pool.to(dtype) for pool in pools)
        return cls(heads_and_more[:, : group * num_kv_heads], keys, values, pages, shape, length)

    def computed(self) -> Tensor:
        """By the loops."""
        from services.gpu_worker.attention.tile_attention import TileAttention

        num_new = len(self.queries)
        span = RowSpan(0, slice(0, num_new), 0, self.length)
        out = torch.full(self.queries.shape, math.nan)
        TileAttention(span, self.pages, self.shape).attend(self.queries, self.keys, self.values, out)
        return out

    def expected(self) -> Tensor:
        """In double precision, of numbers rounded to bfloat16."""
        num_new, num_heads, _ = self.queries.shape
        slots = slots_of(self.pages, self.shape.page_size, self.length)
        group = num_heads // self.shape.num_kv_heads
        keys, values = (
            pool[slots].bfloat16().double().permute(1, 0, 2).repeat_interleave(group, 0)
            for pool in (self.keys, self.values)
        )
        queries = self.queries.bfloat16().double().permute(1, 0, 2)
        is_seen = torch.arange(self.length) <= torch.arange(self.length - num_new, self.length)[:, None]
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen).permute(1, 0, 2)


def slots_of(pages: Tensor, page_size: int, length: int) -> Tensor:
    return (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]


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
    case = Case.random(heads, num_new, num_before, page_size, dtype, spread, seed)
    # Weights are rounded to 8 bits: each is off by 2^-9 of itself at most, and so is their average of the values.
    largest = float(case.values[case.values.isfinite()].abs().max())
    torch.testing.assert_close(case.computed().double(), case.expected(), rtol=0, atol=2**-8 * largest)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("num_threads", [1, 2, 3], indirect=True)
def test_a_token_is_the_same_whatever_the_chunk_and_however_many_threads() -> None:
    """Of a prompt computed at once and of the end of the same prompt, when its tokens fall on the same tiles."""
    whole = Case.random((3, 2, 64), 96, 0)
    end = Case(whole.queries[32:], whole.keys, whole.values, whole.pages, whole.shape, whole.length)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = whole.computed()
    torch.set_num_threads(before)
    assert torch.equal(whole.computed(), expected)
    assert torch.equal(end.computed(), expected[32:])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_smp_02_what_is_broken_stays_so_for_those_that_see_it(broken: float) -> None:
    case = Case.random((3, 2, 64), 64, 40, dtype=torch.float32)
    case.values[int(slots_of(case.pages, 16, case.length)[40 + 33])] = broken
    assert not case.computed()[33:].isfinite().any()


def test_a_broken_query_breaks_its_own_token() -> None:
    case = Case.random((2, 1, 32), 40, 8)
    clean = case.computed()
    case.queries[21] = math.nan
    computed = case.computed()
    assert computed[21].isnan().all()
    others = [token for token in range(40) if token != 21]
    assert torch.equal(computed[others], clean[others])


def backend(rounds_prompts: bool = True) -> PagedCpuAttention:
    return PagedCpuAttention(torch.float32, computes_in=torch.float32, rounds_prompts=rounds_prompts)


@pytest.mark.parametrize("window", [None, 60, 150])
def test_rows_of_a_step_go_through_tiles_where_each_token_sees_all_before_it(window: int | None) -> None:
    """Beside a row that decodes and one too short to be worth it; the way without tiles gives nearly the same."""
    pool = KvCache(KvCacheShape(1, 2, 64, 16, torch.float32), 40, CPU)
    generator = torch.Generator().manual_seed(3)
    pool.keys.normal_(generator=generator)
    pool.values.normal_(generator=generator)
    lengths = ((1, 20), (40, 0), (12, 5), (64, 80))
    rows = [
        StepRow([1] * num_new, num_before, range(10 * index, 10 * index + 10), samples=True)
        for index, (num_new, num_before) in enumerate(lengths)
    ]
    inputs = build_step_inputs(rows, 16, CPU)
    queries = torch.randn(inputs.num_tokens, 6, 64, generator=generator)
    tiled, plain = (attended(backend(rounds), inputs, pool, queries, window) for rounds in (True, False))
    torch.testing.assert_close(tiled, plain, rtol=0, atol=2**-6 * float(pool.values.abs().max()))
    ends = torch.tensor(inputs.query_lengths).cumsum(0).tolist()
    is_same = [torch.equal(tiled[begin:end], plain[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    assert is_same == [True, False, True, False]


def attended(
    attention: PagedCpuAttention, inputs: StepInputs, pool: KvCache, queries: Tensor, window: int | None
) -> Tensor:
    return attention.begin_step(inputs, pool).attend(0, queries.clone(), window)
