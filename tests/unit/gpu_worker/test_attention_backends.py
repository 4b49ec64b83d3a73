"""Every attention backend against the plain reference, over a pool in which all foreign slots are poisoned with NaN."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.gpu_worker import attention as choice
from services.gpu_worker import kernels
from services.gpu_worker.attention import attention_for, attention_named
from services.gpu_worker.attention.attended_parts import attend_parts, by_head, joined
from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.attention.fastest import AttentionTask
from services.gpu_worker.attention.paged_cpu import PagedCpuAttention
from services.gpu_worker.attention.paged_cuda import PagedCudaAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.attention.row_span import RowSpan, additive_mask, attend_span
from services.gpu_worker.attention.sparse_decode import has_sparse_products
from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.models.operators import PlainOperators
from services.gpu_worker.step_inputs import StepInputs, StepRow, build_step_inputs

CPU = torch.device("cpu")
FAST: dict[str, Callable[[torch.dtype], AttentionBackend]] = {
    "paged_cpu": PagedCpuAttention,
    "paged_cpu_without_loops": lambda dtype: PagedCpuAttention(dtype, uses_loops=False),
    "padded_blocks": lambda dtype: PagedCudaAttention(),
    "small_padded_blocks": lambda dtype: PagedCudaAttention(max_block_elements=100),
}


@dataclass(frozen=True)
class Case:
    """Rows as (computed tokens, new tokens), and the shape of pool and model."""

    rows: tuple[tuple[int, int], ...]
    page_size: int
    num_kv_heads: int
    group: int
    head_dim: int
    window: int | None
    dtype: torch.dtype
    in_order: bool
    seed: int


cases = st.builds(
    Case,
    rows=st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=6).map(
        tuple
    ),
    page_size=st.sampled_from([1, 2, 7, 16]),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16, 64, 80, 112]),
    window=st.one_of(st.none(), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    in_order=st.booleans(),
    seed=st.integers(0, 2**31),
)


class Scene:
    """A step with its pool: the computed tokens hold numbers, every other slot NaN."""

    def __init__(self, case: Case, computes_in: torch.dtype | None = None) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        pages_of = [-(-(computed + new) // case.page_size) for computed, new in case.rows]
        num_pages = sum(pages_of) + 3
        pages = list(range(num_pages)) if case.in_order else torch.randperm(num_pages, generator=generator).tolist()
        shape = KvCacheShape(1, case.num_kv_heads, case.head_dim, case.page_size, case.dtype)
        self.kv_cache = KvCache(shape, num_pages, CPU)
        self.kv_cache.keys.fill_(float("nan"))
        self.kv_cache.values.fill_(float("nan"))
        rows = []
        for (computed, new), num_pages_of_row in zip(case.rows, pages_of, strict=True):
            own, pages = pages[:num_pages_of_row], pages[num_pages_of_row:]
            rows.append(StepRow([0] * new, computed, own, samples=True))
            slots = torch.tensor(
                [own[p // case.page_size] * case.page_size + p % case.page_size for p in range(computed)]
            )
            for pool in (self.kv_cache.key_slots(0), self.kv_cache.value_slots(0)):
                pool[slots.long()] = torch.randn(computed, *pool.shape[1:], generator=generator).to(case.dtype)
        self.rows = rows
        self.case = case
        self.inputs = build_step_inputs(rows, case.page_size, CPU)
        num_heads = case.num_kv_heads * case.group
        heads = torch.randn(
            self.inputs.num_tokens, num_heads + 2 * case.num_kv_heads, case.head_dim, generator=generator
        )
        # Slices of one product, as in a model: not contiguous.
        heads = heads.to(computes_in or case.dtype)
        self.queries = heads[:, :num_heads]
        self.keys, self.values = heads[:, num_heads:].chunk(2, dim=1)

    def attend(self, backend: AttentionBackend) -> Tensor:
        return attend(backend, self.inputs, self.kv_cache, (self.queries, self.keys, self.values), self.case.window)

    def attend_alone(self, backend: AttentionBackend, row: int) -> Tensor:
        """One row of the step by itself."""
        start, end = self.inputs.query_starts[row], self.inputs.query_starts[row + 1]
        inputs = build_step_inputs([self.rows[row]], self.case.page_size, CPU)
        parts = (self.queries[start:end], self.keys[start:end], self.values[start:end])
        return attend(backend, inputs, self.kv_cache, parts, self.case.window)


def attend(
    backend: AttentionBackend,
    inputs: StepInputs,
    kv_cache: KvCache,
    parts: tuple[Tensor, Tensor, Tensor],
    window: int | None,
) -> Tensor:
    step = backend.begin_step(inputs, kv_cache)
    step.write_kv(0, parts[1], parts[2])
    return step.attend(0, parts[0], window)


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=120, deadline=None)
@given(case=cases)
def test_agrees_with_the_reference(name: str, case: Case) -> None:
    scene = Scene(case)
    expected = scene.attend(ReferenceAttention())
    computed = scene.attend(FAST[name](case.dtype))
    tolerance = 1e-5 if case.dtype == torch.float32 else 0.03
    torch.testing.assert_close(computed, expected, atol=tolerance, rtol=tolerance)
    assert not computed.isnan().any()


@settings(max_examples=50, deadline=None)
@given(case=cases)
def test_a_pool_in_half_precision_is_read_in_float32(case: Case) -> None:
    scene = Scene(replace(case, dtype=torch.float16), torch.float32)
    backend = PagedCpuAttention(torch.float16, computes_in=torch.float32)
    computed = scene.attend(backend)
    assert computed.dtype == torch.float32
    torch.testing.assert_close(computed, scene.attend(ReferenceAttention()), atol=1e-5, rtol=1e-5)
    for row in range(len(case.rows)):
        start, end = scene.inputs.query_starts[row], scene.inputs.query_starts[row + 1]
        assert torch.equal(scene.attend_alone(backend, row), computed[start:end])


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("in_order", [True, False])
def test_rows_of_many_new_tokens_may_be_rounded(window: int | None, in_order: bool) -> None:
    case = Case(((40, 50), (0, 64), (30, 1), (5, 31)), 4, 2, 2, 16, window, torch.float32, in_order, seed=7)
    scene = Scene(case)
    exact = scene.attend(PagedCpuAttention(torch.float32))
    rounded = scene.attend(PagedCpuAttention(torch.float32, rounds_prompts=True))
    many = 50 + 64
    assert torch.equal(rounded[many:], exact[many:])
    assert not torch.equal(rounded[:many], exact[:many])
    torch.testing.assert_close(rounded, exact, atol=0.03, rtol=0.03)
    for row in range(len(case.rows)):
        start, end = scene.inputs.query_starts[row], scene.inputs.query_starts[row + 1]
        alone = scene.attend_alone(PagedCpuAttention(torch.float32, rounds_prompts=True), row)
        assert torch.equal(alone, rounded[start:end])


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("num_before", "num_new"), [(1, 1), (1, 33), (70, 2), (64, 64), (600, 40), (300, 300)])
def test_computed_and_new_tokens_apart_are_attended_as_together(
    num_before: int, num_new: int, group: int, head_dim: int
) -> None:
    span = RowSpan(0, slice(0, num_new), 0, num_before + num_new)
    generator = torch.Generator().manual_seed(num_before + num_new)
    queries = 3 * torch.randn(num_new, 2 * group, head_dim, generator=generator)
    keys, values = 3 * torch.randn(2, num_before + num_new, 2, head_dim, generator=generator)
    mask = additive_mask(span, None, torch.float32, CPU)
    expected = attend_span(queries, keys, values, mask)
    parts = attend_parts(by_head(queries, 2, torch.float32), keys, values)
    torch.testing.assert_close(joined(parts), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.skipif(bool(loops_problem()), reason=str(loops_problem()))
@pytest.mark.parametrize(
    ("num_before", "num_new", "num_kv_heads", "group"), [(5, 1, 1, 1), (90, 40, 3, 3), (7, 300, 2, 4)]
)
def test_loops_round_and_join_parts_as_the_plain_way_does(
    num_before: int, num_new: int, num_kv_heads: int, group: int
) -> None:
    from services.gpu_worker.attention.loop_decode import LoopAttention  # only where there is numba

    generator = torch.Generator().manual_seed(num_new)
    heads = 3 * torch.randn(num_new, num_kv_heads * group + 2, 32, generator=generator)
    queries = heads[:, 1:-1]
    keys, values = torch.randn(2, num_before + num_new, num_kv_heads, 32, generator=generator).to(torch.bfloat16)
    loops = LoopAttention()
    rounded = loops.rounded_by_head(queries).view(num_kv_heads, group, num_new, 32)
    assert torch.equal(rounded, by_head(queries.contiguous(), num_kv_heads, torch.bfloat16))
    parts = attend_parts(rounded, keys, values)
    out = torch.full((num_new, num_kv_heads * group, 32), torch.nan)
    loops.join(parts, out)
    torch.testing.assert_close(out, joined(parts), atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_a_row_is_the_same_alone_and_in_a_batch(case: Case) -> None:
    scene = Scene(case)
    backend = PagedCpuAttention(case.dtype)
    together = scene.attend(backend)
    for row in range(len(case.rows)):
        start, end = scene.inputs.query_starts[row], scene.inputs.query_starts[row + 1]
        assert torch.equal(scene.attend_alone(backend, row), together[start:end])


@pytest.mark.parametrize("name", FAST)
def test_smp_02_a_nan_in_one_row_stays_in_that_row(name: str) -> None:
    case = Case(((20, 1), (9, 1), (12, 3)), 4, 2, 2, 16, None, torch.float32, in_order=False, seed=3)
    clean, broken = Scene(case), Scene(case)
    page = broken.rows[1].page_ids[0]
    broken.kv_cache.values[0, page, 2] = float("nan")
    expected, computed = (scene.attend(FAST[name](torch.float32)) for scene in (clean, broken))
    assert computed[1].isnan().any()
    assert torch.equal(computed[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])


def test_the_cpu_decodes_float32_in_place() -> None:
    """The path that copies no context is the one that is used, where torch has it."""
    assert has_sparse_products(torch.float32)
    assert not has_sparse_products(torch.bfloat16)


def test_heads_too_wide_for_the_kernels_take_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, ours = torch.device("cuda"), ReferenceAttention()

    def task(head_dim: int) -> AttentionTask:
        return AttentionTask(cuda, torch.bfloat16, KvCacheShape(1, 1, head_dim, 16, torch.bfloat16), 1)

    monkeypatch.setattr(choice, "_triton", lambda device: ours)
    monkeypatch.setattr(choice, "triton_problem", lambda: None)
    assert attention_for(cuda, torch.bfloat16, 256) is ours
    assert attention_named("triton", task(256)) is ours
    assert isinstance(attention_for(cuda, torch.bfloat16, 257), PagedCudaAttention)
    assert isinstance(attention_named("paged", task(128)), PagedCudaAttention)
    with pytest.raises(ValueError, match="heads are 257 wide, its kernels take 256"):
        attention_named("triton", task(257))
    monkeypatch.setattr(choice, "triton_problem", lambda: "Triton is not installed")
    assert isinstance(attention_for(cuda, torch.bfloat16, 256), PagedCudaAttention)
    with pytest.raises(ValueError, match="Triton is not installed"):
        attention_named("triton", task(128))


def test_what_keeps_kernels_from_being_launched_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python.h" in str(kernels.triton_problem())
    (tmp_path / "Python.h").touch()
    assert kernels.triton_problem() is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "neither gcc nor clang" in str(kernels.triton_problem())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(kernels.triton_problem())
    assert isinstance(operators_for(torch.device("cuda")), PlainOperators)


@pytest.mark.parametrize("page_size", [1, 16])
def test_decoding_copies_no_context(page_size: int) -> None:
    """What a layer allocates does not grow with the context: keys and values are read where they lie."""

    def allocated_bytes(context: int) -> int:
        scene = Scene(Case(((context, 1),) * 4, page_size, 2, 3, 16, None, torch.float32, in_order=False, seed=1))
        step = PagedCpuAttention(torch.float32).begin_step(scene.inputs, scene.kv_cache)
        step.write_kv(0, scene.keys, scene.values)
        step.attend(0, scene.queries, None)  # lays out what the layers share
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            step.attend(0, scene.queries, None)
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())

    assert 0 < allocated_bytes(2000) <= allocated_bytes(50) < 10_000
