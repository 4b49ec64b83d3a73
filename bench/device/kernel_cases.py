"""Every Triton kernel against the plain way it stands for, on any device: a list of cases, and what each differs by.

On a CPU they run through Triton's interpreter (`make test-kernels`); `bench/device_check.sh` runs them for real.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.attention.paged_triton import PagedTritonAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.fp8 import E4M3, E5M2
from services.gpu_worker.kernels import fp8_rows
from services.gpu_worker.kernels.expert_steps import FusedExpertSteps
from services.gpu_worker.kernels.grouped_product import grouped_product
from services.gpu_worker.kernels.operators import FusedOperators
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.models.config import ExpertConfig
from services.gpu_worker.models.expert_steps import PlainExpertSteps
from services.gpu_worker.models.operators import PlainOperators
from services.gpu_worker.models.rotary import rotary_cos_sin, rotate
from services.gpu_worker.products.fp8 import round_rows
from services.gpu_worker.step_inputs import StepRow, build_step_inputs

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
"""Most that a kernel may differ by, of numbers around 1: some units of the last place."""

_EPS = 1e-5
_MOST_KEYS_OFF = 0.1


@dataclass(frozen=True)
class AttentionCase:
    """A step over a pool in which every slot that is nobody's business holds a NaN.

    Attributes:
        rows: (computed tokens, new tokens) of each.
        num_processors: decides into how many splits a decoding row is cut.
        kv_dtype: of the pool, None: as `dtype`.
    """

    rows: tuple[tuple[int, int], ...]
    page_size: int = 16
    head_dim: int = 64
    num_kv_heads: int = 1
    group: int = 1
    window: int | None = None
    dtype: torch.dtype = torch.float32
    num_processors: int = 1
    kv_dtype: torch.dtype | None = None


def lengths_around(page_size: int) -> list[int]:
    """1 to 3 pages of tokens: every boundary between pages, one before and one behind it."""
    ends = (pages * page_size for pages in (1, 2, 3))
    return sorted({1, *(length for end in ends for length in range(end - 1, end + 2) if length)})


def attention_cases() -> Iterator[AttentionCase]:
    """Page sizes x head dims x dtypes, with lengths around every page boundary; then groups, windows and splits."""
    for page_size, head_dim, dtype in product((1, 16, 64), (64, 128), (torch.float32, torch.bfloat16)):
        lengths = lengths_around(page_size)
        decodes = tuple((length - 1, 1) for length in lengths)
        yield AttentionCase(decodes, page_size, head_dim, group=2, dtype=dtype)
        prefixes = [(0, lengths[-1]), (page_size, page_size + 1), (2 * page_size, 3), (page_size - 1, 2)]
        yield AttentionCase((*prefixes, (page_size, 1)), page_size, head_dim, group=2, dtype=dtype)
    for group in range(1, 9):
        yield AttentionCase(((20, 1), (0, 1), (5, 9)), num_kv_heads=2, group=group)
    for window in (1, 5, 16, 30):
        yield AttentionCase(((40, 1), (3, 1), (30, 20), (0, 33), (29, 1)), 7, 16, group=3, window=window)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield AttentionCase(((900, 1), (0, 1), (127, 1)), 16, 64, group=4, dtype=dtype, num_processors=8)
    yield AttentionCase(((900, 1), (300, 1)), 16, 64, window=200, num_processors=8)
    yield AttentionCase(((30, 1), (4, 20)), 16, 80, group=2)  # heads that are no power of two wide
    yield AttentionCase(((10, 100), (0, 70)), 16, 64)  # several blocks of queries
    for dtype, kv_dtype in product((torch.float32, torch.bfloat16), (E4M3, E5M2)):
        mixed = ((300, 1), (0, 1), (20, 30), (0, 17))
        yield AttentionCase(mixed, 16, 64, group=2, dtype=dtype, num_processors=4, kv_dtype=kv_dtype)


def attention_results(case: AttentionCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """What our kernels give, and what the reference gives: [num_tokens, num_heads, head_dim] each."""
    generator = torch.Generator().manual_seed(11)
    pages_of = [-(-(computed + new) // case.page_size) for computed, new in case.rows]
    shape = KvCacheShape(1, case.num_kv_heads, case.head_dim, case.page_size, case.kv_dtype or case.dtype)
    kv_cache = KvCache(shape, sum(pages_of) + 2, device)
    kv_cache.keys.fill_(float("nan"))
    kv_cache.values.fill_(float("nan"))
    pages = torch.randperm(kv_cache.num_pages, generator=generator).tolist()
    rows = []
    for (computed, new), num_pages in zip(case.rows, pages_of, strict=True):
        own, pages = pages[:num_pages], pages[num_pages:]
        rows.append(StepRow([0] * new, computed, own, samples=True))
        slots = torch.tensor([own[p // case.page_size] * case.page_size + p % case.page_size for p in range(computed)])
        for pool in (kv_cache.key_slots(0), kv_cache.value_slots(0)):
            pool[slots.long().to(device)] = torch.randn(computed, *pool.shape[1:], generator=generator).to(pool)
    inputs = build_step_inputs(rows, case.page_size, device)
    num_heads = case.num_kv_heads * case.group
    # Slices of one product, as in a model: not contiguous.
    heads = torch.randn(inputs.num_tokens, num_heads + 2 * case.num_kv_heads, case.head_dim, generator=generator)
    heads = heads.to(device, case.dtype)

    def attend(backend: AttentionBackend) -> Tensor:
        step = backend.begin_step(inputs, kv_cache)
        step.write_kv(0, heads[:, num_heads : num_heads + case.num_kv_heads], heads[:, num_heads + case.num_kv_heads :])
        return step.attend(0, heads[:, :num_heads], case.window)

    return attend(PagedTritonAttention(case.num_processors)), attend(ReferenceAttention())


def norm_results(num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Norm alone, of heads that are a view too, sum and norm of the sum; what the kernel gives, and the plain way."""
    operators, plain = FusedOperators(), PlainOperators()
    hidden, addend = torch.randn(2, num_tokens, width, device=device).to(dtype)
    heads = torch.randn(num_tokens, 5, width, device=device).to(dtype)[:, 1:4]
    weight = torch.randn(width, device=device).to(dtype)
    total = hidden + addend
    results = [(operators.norm(x, weight, _EPS), plain.norm(x, weight, _EPS)) for x in (hidden, heads)]
    added, normed = operators.add_norm(hidden, addend, weight, _EPS)
    return [*results, (added, total), (normed, plain.norm(total, weight, _EPS))]


def gated_results(num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """silu(gate) * up: what the kernel gives, and the plain way."""
    gate_up = torch.randn(num_tokens, 2 * width, device=device).to(dtype)
    return FusedOperators().gated(gate_up), PlainOperators().gated(gate_up)


@dataclass(frozen=True)
class RotaryCase:
    """Heads that are rotated and written."""

    num_tokens: int
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None


def rotary_cases() -> Iterator[RotaryCase]:
    """Few tokens and many, every page size and head dim."""
    for page_size, head_dim, dtype in product((1, 16, 64), (64, 128), (torch.float32, torch.bfloat16)):
        yield RotaryCase(3, 3, 2, head_dim, page_size, dtype)
    yield RotaryCase(70, head_dim=80)
    for dtype, kv_dtype in product((torch.float32, torch.bfloat16), (E4M3, E5M2)):
        yield RotaryCase(70, 2, 2, dtype=dtype, kv_dtype=kv_dtype)


def rotary_results(case: RotaryCase, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Queries, keys of the pool and values of the pool: what the kernel gives, and the plain way.

    Of keys that are rounded to 8 bits, whose last bit may differ before, only whether more than a few are others.
    """
    generator = torch.Generator().manual_seed(12)
    num_heads, num_kv_heads, head_dim = case.num_heads, case.num_kv_heads, case.head_dim
    qkv = torch.randn(case.num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    if case.kv_dtype is not None:  # values from below the smallest number that is kept to beyond the largest
        qkv[:, num_heads + num_kv_heads :] *= torch.logspace(-9, 5, head_dim)
    heads, values = torch.split_with_sizes(qkv.to(device, case.dtype), [num_heads + num_kv_heads, num_kv_heads], dim=1)
    positions = torch.randint(0, 300, (case.num_tokens,), generator=generator).to(device)
    frequencies = torch.rand(head_dim // 2, generator=generator).to(device)
    cos_sin = rotary_cos_sin(frequencies, 1.0, positions, case.dtype)
    shape = KvCacheShape(1, num_kv_heads, head_dim, case.page_size, case.kv_dtype or case.dtype)
    pools = [KvCache(shape, -(-2 * case.num_tokens // case.page_size), device) for _ in range(2)]
    num_pages = -(-case.num_tokens // case.page_size)
    inputs = build_step_inputs(
        [StepRow([0] * case.num_tokens, 0, range(num_pages)[::-1], True)], case.page_size, device
    )
    step = PagedTritonAttention(1).begin_step(inputs, pools[0])
    queries = step.write_rotated(0, heads, values, cos_sin)
    rotated = rotate(heads, *cos_sin)
    pools[1].write(0, inputs.slot_mapping, rotated[:, num_heads:], values)
    plain = [(queries, rotated[:, :num_heads]), (pools[0].values.float(), pools[1].values.float())]
    if case.kv_dtype is not None:
        is_off = pools[0].keys.float() != pools[1].keys.float()
        return [*plain, (is_off.float().mean() > _MOST_KEYS_OFF, torch.zeros(()))]
    return [*plain, (pools[0].keys, pools[1].keys)]


def rounding_results(num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs of 8-bit products, decoded again: rounded by the kernel, and the plain way. One token is all zeros."""
    x = torch.randn(num_tokens, width, device=device).to(dtype) * torch.arange(num_tokens, device=device)[:, None]
    found, expected = (codes.float() * scales for codes, scales in (fp8_rows.round_rows(x), round_rows(x)))
    return found, expected


def expert_step_results(
    num_tokens: int, experts: ExpertConfig, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Routing, groups and what is joined: of our kernels, and the plain way."""
    generator = torch.Generator().manual_seed(14)
    logits = torch.randn(num_tokens, experts.num_experts, generator=generator).to(device, dtype)
    results = torch.randn(num_tokens * experts.num_chosen, 72, generator=generator).to(device, dtype)
    plain = PlainExpertSteps()
    routing = plain.route(logits, experts)
    groups = plain.group(routing.experts, experts.num_experts)
    joined = plain.join(results, groups.places, routing.shares)
    fused = FusedExpertSteps()
    found = fused.route(logits, experts)
    # Of two as likely ones either may be chosen: what is chosen is compared by its probability.
    probabilities = logits.softmax(-1, dtype=torch.float32)
    own = fused.group(routing.experts, experts.num_experts)
    return [
        (_of_experts(probabilities, found.experts), _of_experts(probabilities, routing.experts)),
        (found.shares, routing.shares),
        (own.rows, groups.rows),
        (own.places, groups.places),
        (own.ends, groups.ends),
        (fused.join(results, groups.places, routing.shares), joined),
    ]


def _of_experts(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Those of the chosen; -1 for a number that is no expert's."""
    is_expert = (experts >= 0) & (experts < probabilities.shape[1])
    return probabilities.gather(1, experts.where(is_expert, 0)).where(is_expert, -1.0)


@dataclass(frozen=True)
class GroupedCase:
    """Rows of experts, sorted by expert: how many each has."""

    counts: tuple[int, ...]
    width: int = 72
    num_columns: int = 40
    dtype: torch.dtype = torch.float32


def grouped_cases() -> Iterator[GroupedCase]:
    """Experts without rows at every place, one row and many, tiles that are full and not, any number of experts."""
    for counts, dtype in product(
        ((3, 0, 17), (0, 0, 1, 0), (40, 5, 0, 0, 33, 1), (2,) * 8 + (0,) * 5, (16, 32), (7,)),
        (torch.float32, torch.bfloat16, torch.float16),
    ):
        yield GroupedCase(counts, dtype=dtype)
    yield GroupedCase((200, 0, 100, 1), 64, 130)  # high tiles, columns of several
    yield GroupedCase((1, 2), 5, 3)  # matrices smaller than a tile


def grouped_results(case: GroupedCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """The product with all experts at once, and one after another: [num_rows, num_columns] each."""
    x, stack, ends = grouped_inputs(case, device)
    parts = zip(torch.split_with_sizes(x, list(case.counts)), stack, strict=True)
    expected = torch.cat([functional.linear(rows.float(), matrix.float()) for rows, matrix in parts])
    return grouped_product(x, stack, ends), expected.to(case.dtype)


def grouped_inputs(case: GroupedCase, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of a `GroupedProduct`; results are around 1."""
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(sum(case.counts), case.width, generator=generator)
    stack = torch.randn(len(case.counts), case.num_columns, case.width, generator=generator) * case.width**-0.5
    ends = torch.tensor(case.counts).cumsum(0).to(torch.int32)
    return x.to(device, case.dtype), stack.to(device, case.dtype), ends.to(device)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest, relative for numbers beyond 1; infinite where something is NaN."""
    error = (found.float() - expected.float()).abs() / expected.float().abs().clamp(min=1.0)
    return float(error.nan_to_num(nan=float("inf")).max())
