"""Which attention is taken: what goes, what is measured faster, and that torch's and FlashInfer's are asked rightly.

Neither of the two runs without a CUDA device. Functions that keep to their documents stand here in their place: what is
shown is that they are handed the right rows, pages, lengths and windows.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from services.gpu_worker.attention import attention_named
from services.gpu_worker.attention.backend import AttentionBackend, StepAttention, plain_write_rotated
from services.gpu_worker.attention.fastest import (
    AttentionTask,
    Size,
    SplitAttention,
    Times,
    choose,
    fastest_attention,
    measure,
)
from services.gpu_worker.attention.flashinfer_paged import FlashInferAttention, flashinfer_problem
from services.gpu_worker.attention.paged_cuda import PagedCudaAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.attention.row_span import attend_span
from services.gpu_worker.attention.varlen import VarlenAttention, varlen_parameters, varlen_problem
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.models.rotary import rotary_cos_sin
from services.gpu_worker.step_inputs import StepInputs, StepRow, build_step_inputs
from tests.unit.gpu_worker.recording_device import RecordableReference
from tests.unit.gpu_worker.test_attention_backends import CPU, Case, Scene, cases

SHAPE = KvCacheShape(2, 2, 16, 4, torch.float32)
TASK = AttentionTask(CPU, torch.float32, SHAPE, 6)
TINY = Size(num_rows=2, num_tokens=12)


def over_pages(queries: Tensor, pool: tuple[Tensor, Tensor], pages: Tensor, length: int, left: int) -> Tensor:
    """Causal attention of a row's last tokens, each over itself and `left` tokens before it (-1: all)."""
    keys, values = (part[pages.long()].flatten(0, 1)[:length] for part in pool)
    at = torch.arange(length)
    new = at[-len(queries) :, None]
    hidden = (at > new) | (at < new - left if left >= 0 else torch.zeros_like(at, dtype=torch.bool))
    mask = torch.zeros(hidden.shape, dtype=queries.dtype).masked_fill_(hidden, float("-inf"))
    return attend_span(queries, keys, values, mask)


def documented_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """As torch's documentation has it."""
    assert {cu_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert cu_seq_k is None
    assert enable_gqa
    assert window_size[1] == 0
    assert max_q == int(cu_seq_q.diff().max())
    assert max_k >= int(seqused_k.max())
    return torch.cat(
        [
            over_pages(query[start:end], (key, value), pages, length, window_size[0])
            for start, end, length, pages in zip(
                cu_seq_q.tolist(), cu_seq_q.tolist()[1:], seqused_k.tolist(), block_table, strict=False
            )
        ]
    )


@dataclass
class DocumentedWrapper:
    """As FlashInfer's documentation has it."""

    indices: tuple[Tensor | int, ...] = ()
    options: dict[str, object] = field(default_factory=dict)

    def plan(self, *indices: Tensor | int, **options: object) -> None:
        self.indices, self.options = indices, options

    def run(self, queries: Tensor, pool: tuple[Tensor, Tensor]) -> Tensor:
        starts, page_starts, pages, last_lengths = (part for part in self.indices[:4] if isinstance(part, Tensor))
        assert {part.dtype for part in (starts, page_starts, pages, last_lengths)} == {torch.int32}
        page_size, num_kv_heads, head_dim = pool[0].shape[1:]
        assert self.indices[4:] == (queries.shape[1], num_kv_heads, head_dim, page_size)
        assert self.options["causal"] is True
        assert self.options["q_data_type"] == self.options["kv_data_type"] == queries.dtype
        left = self.options["window_left"]
        assert isinstance(left, int)
        results = []
        for row, last in enumerate(last_lengths.tolist()):
            own = pages[page_starts[row] : page_starts[row + 1]]
            length = (len(own) - 1) * page_size + last
            results.append(over_pages(queries[starts[row] : starts[row + 1]], pool, own, length, left))
        return torch.cat(results)


WAYS: dict[str, Callable[[], AttentionBackend]] = {
    "varlen": lambda: VarlenAttention(documented_varlen, plain_write_rotated),
    "flashinfer": lambda: FlashInferAttention(DocumentedWrapper, plain_write_rotated),
}


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_rows_pages_and_windows_are_handed_over_rightly(name: str, case: Case) -> None:
    scene = Scene(case)
    for pool in (scene.kv_cache.keys, scene.kv_cache.values):
        pool.nan_to_num_(0.0)  # what stands in their place reads whole pages
    tolerance = 1e-5 if case.dtype == torch.float32 else 0.03
    expected = scene.attend(ReferenceAttention())
    torch.testing.assert_close(scene.attend(WAYS[name]()), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", WAYS)
def test_layers_with_and_without_a_window_and_what_they_write(name: str) -> None:
    rows = [StepRow([0] * 3, 9, range(3), True), StepRow([0], 5, range(3, 6), True)]
    inputs = build_step_inputs(rows, SHAPE.page_size, CPU)
    results = []
    for backend in (WAYS[name](), ReferenceAttention()):
        torch.manual_seed(1)
        cache = KvCache(SHAPE, 6, CPU)
        cache.keys.normal_()
        cache.values.normal_()
        step = backend.begin_step(inputs, cache)
        cos_sin = rotary_cos_sin(torch.rand(8), 1.0, inputs.positions, torch.float32)
        queries = step.write_rotated(1, torch.randn(4, 8, 16), torch.randn(4, 2, 16), cos_sin)
        results.append([queries, cache.keys, cache.values, *(step.attend(1, queries, window) for window in (None, 4))])
        results[-1].append(step.attend(0, queries, None))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_decode_is_laid_out_on_the_device_alone() -> None:
    """What is handed over follows from tensors; of host numbers only the largest length is read."""
    rows = [StepRow([0], 5, range(2), True), StepRow([0], 2, range(2, 3), True)]
    inputs = build_step_inputs(rows, SHAPE.page_size, CPU)
    cache = KvCache(SHAPE, 3, CPU)
    handed: list[tuple[list[int], list[int], int]] = []

    def noted(query: Tensor, *others: Any, **options: Any) -> Tensor:
        _, _, cu_seq_q, _, _, max_k = others
        handed.append((cu_seq_q.tolist(), options["seqused_k"].tolist(), max_k))
        return query

    backend = VarlenAttention(noted, plain_write_rotated)
    wide = StepInputs(
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.page_table,
        (1, 1),
        (40, 40),
        inputs.sample_indices,
    )
    for step in (backend.begin_step(inputs, cache), backend.begin_decode(wide, cache)):
        step.attend(0, torch.zeros(2, 6, 16), None)
    assert handed == [([0, 1, 2], [6, 3], 6), ([0, 1, 2], [6, 3], 40)]


def test_where_torchs_attention_goes() -> None:
    half = torch.bfloat16
    named = ("query", "window_size", "enable_gqa", "seqused_k", "block_table")
    assert varlen_problem(KvCacheShape(1, 8, 128, 256, half), half, named) is None
    assert "no varlen_attn with block_table" in str(varlen_problem(KvCacheShape(1, 8, 128, 256, half), half, named[:4]))
    assert "not of 16" in str(varlen_problem(KvCacheShape(1, 8, 128, 16, half), half, named))
    assert "half precision" in str(varlen_problem(KvCacheShape(1, 8, 128, 256, torch.float32), torch.float32, named))
    assert "half precision" in str(varlen_problem(KvCacheShape(1, 8, 128, 256, torch.float8_e4m3fn), half, named))
    assert "are 320 wide" in str(varlen_problem(KvCacheShape(1, 8, 320, 256, half), half, named))
    assert "query" in varlen_parameters() or not varlen_parameters()


def test_where_flashinfer_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.float16
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert flashinfer_problem(KvCacheShape(1, 8, 128, 16, half), half) is None
    assert "half precision" in str(flashinfer_problem(KvCacheShape(1, 8, 128, 16, torch.float8_e5m2), half))
    assert "are 80 wide" in str(flashinfer_problem(KvCacheShape(1, 8, 80, 16, half), half))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert flashinfer_problem(KvCacheShape(1, 8, 128, 16, half), half) == "flashinfer is not installed"


@pytest.mark.parametrize("name", ["triton", "varlen", "flashinfer"])
def test_those_for_cuda_are_refused_on_a_cpu(name: str) -> None:
    with pytest.raises(ValueError, match="it needs a CUDA device"):
        attention_named(name, TASK)


def test_decode_and_chunks_are_chosen_apart_among_what_can_be_captured() -> None:
    times = {"a": Times(3.0, 5.0), "b": Times(1.0, 2.0), "c": Times(2.0, 9.0)}
    assert choose(times, ("a", "b", "c")) == ("b", "b")
    assert choose(times, ("a", "c")) == ("c", "b")
    assert choose(times, ("a",)) == ("a", "b")
    assert choose(times, ()) == ("b", "b")
    assert choose({"a": Times(1.0, 5.0), "b": Times(4.0, 1.0)}, ()) == ("b", "b")


class Wrong(ReferenceAttention):
    """Gives other numbers."""

    def begin_step(self, inputs: StepInputs, kv_cache: KvCache) -> StepAttention:  # type: ignore[override]
        return super().begin_step(build_step_inputs([StepRow([0], 0, [0], True)], 4, CPU), kv_cache)


class Broken:
    """Does not run here."""

    def begin_step(self, inputs: StepInputs, kv_cache: KvCache) -> StepAttention:
        raise RuntimeError("no kernel image is available\nfor this device")


def test_what_is_wrong_or_does_not_run_is_not_used_and_told(caplog: pytest.LogCaptureFixture) -> None:
    candidates: dict[str, AttentionBackend] = {"wrong": Wrong(), "broken": Broken(), "paged": PagedCudaAttention()}
    with caplog.at_level(logging.WARNING):
        times = measure(candidates, TASK, TINY)
    assert list(times) == ["paged"]
    assert times["paged"].decode_s > 0
    assert times["paged"].chunk_s > 0
    first, second = caplog.messages
    assert first.startswith("attention wrong: does not")
    assert second == "attention broken: does not run here, it is not used: no kernel image is available"


def test_the_fastest_is_taken_or_two_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, recordable, broken = PagedCudaAttention(), RecordableReference(), Broken()
    assert fastest_attention({"only": broken}, TASK) is broken
    assert fastest_attention({"first": broken, "second": broken}, TASK, TINY) is broken
    times: dict[str, Times] = {}
    monkeypatch.setattr("services.gpu_worker.attention.fastest.measure", lambda *arguments: times)
    times |= {"plain": Times(1.0, 1.0), "recordable": Times(2.0, 2.0)}
    joined = fastest_attention({"plain": plain, "recordable": recordable}, TASK)
    assert isinstance(joined, SplitAttention)
    times["plain"] = Times(1.0, 3.0)
    assert fastest_attention({"plain": plain, "recordable": recordable}, TASK) is recordable


@pytest.mark.parametrize("rows", [((20, 1), (9, 1)), ((20, 1), (9, 4))])
def test_two_joined_are_one(rows: tuple[tuple[int, int], ...]) -> None:
    scene = Scene(Case(rows, 4, 2, 2, 8, None, torch.float32, in_order=False, seed=3))
    joined = SplitAttention(RecordableReference(), PagedCudaAttention())
    torch.testing.assert_close(scene.attend(joined), scene.attend(ReferenceAttention()), atol=1e-5, rtol=1e-5)
    if all(new == 1 for _, new in rows):
        step = joined.begin_decode(scene.inputs, scene.kv_cache)
        torch.testing.assert_close(
            step.attend(0, scene.queries, None), scene.attend(ReferenceAttention()), atol=1e-5, rtol=1e-5
        )
