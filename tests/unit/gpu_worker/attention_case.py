"""Attention of one row with many new tokens: what it is computed from, and the naive sum in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.attention.row_span import RowSpan
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.step_inputs import StepInputs, StepRow, build_step_inputs

Heads = tuple[int, int, int]
"""Query heads for each key/value head, key/value heads, their width."""


@dataclass(frozen=True)
class AttentionCase:
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
    ) -> AttentionCase:  # fmt: skip
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

    def span(self, window: int | None = None) -> RowSpan:
        """The row, under a window."""
        num_new = len(self.queries)
        first = 0 if window is None else max(0, self.length - num_new - window + 1)
        return RowSpan(0, slice(0, num_new), first, self.length)

    def expected(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """In double precision, of numbers rounded to a dtype."""
        num_new, num_heads, _ = self.queries.shape
        slots = slots_of(self.pages, self.shape.page_size, self.length)
        group = num_heads // self.shape.num_kv_heads
        keys, values = (
            pool[slots].to(dtype).double().permute(1, 0, 2).repeat_interleave(group, 0)
            for pool in (self.keys, self.values)
        )
        queries = self.queries.to(dtype).double().permute(1, 0, 2)
        positions = torch.arange(self.length - num_new, self.length)[:, None]
        is_seen = torch.arange(self.length) <= positions
        if window is not None:
            is_seen &= torch.arange(self.length) > positions - window
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen).permute(1, 0, 2)


def slots_of(pages: Tensor, page_size: int, length: int) -> Tensor:
    """Where the row's tokens lie, in order."""
    return (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]


Computed = Callable[[AttentionCase], Tensor]
"""What a loop makes of a case."""


def check_chunks_and_threads(computed: Computed, num_tokens: int, cut: int) -> None:
    """A prompt computed at once, by one thread and by as many as are set, and its end behind `cut` tokens: the same."""
    whole = AttentionCase.random((3, 2, 64), num_tokens, 0)
    end = AttentionCase(whole.queries[cut:], whole.keys, whole.values, whole.pages, whole.shape, whole.length)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = computed(whole)
    torch.set_num_threads(before)
    assert torch.equal(computed(whole), expected)
    assert torch.equal(computed(end), expected[cut:])


def check_broken_query(computed: Computed) -> None:
    """It breaks its own token and no other."""
    case = AttentionCase.random((2, 1, 32), 40, 8)
    clean = computed(case)
    case.queries[21] = math.nan
    broken = computed(case)
    assert broken[21].isnan().all()
    others = [token for token in range(40) if token != 21]
    assert torch.equal(broken[others], clean[others])


def step_of_four_rows() -> tuple[KvCache, StepInputs, Tensor]:
    """A pool of random numbers in float32, a step of rows that decode, begin, go on a little and go on, and queries."""
    device = torch.device("cpu")
    pool = KvCache(KvCacheShape(1, 2, 64, 16, torch.float32), 40, device)
    generator = torch.Generator().manual_seed(3)
    pool.keys.normal_(generator=generator)
    pool.values.normal_(generator=generator)
    lengths = ((1, 20), (40, 0), (12, 5), (64, 80))
    rows = [
        StepRow([1] * num_new, num_before, range(10 * index, 10 * index + 10), samples=True)
        for index, (num_new, num_before) in enumerate(lengths)
    ]
    inputs = build_step_inputs(rows, 16, device)
    return pool, inputs, torch.randn(inputs.num_tokens, 6, 64, generator=generator)
