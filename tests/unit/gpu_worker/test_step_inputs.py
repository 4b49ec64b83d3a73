"""The layout of a step, and the pool that it points into."""

from __future__ import annotations

import pytest
import torch

from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.step_inputs import StepRow, build_step_inputs, one_row_a_token

CPU = torch.device("cpu")


def test_rows_are_flattened_one_after_another() -> None:
    rows = [StepRow([7, 8, 9], 5, [4, 0], samples=True), StepRow([3], 9, [2, 5, 1], samples=False)]
    inputs = build_step_inputs(rows, 4, CPU)
    assert inputs.input_ids.tolist() == [7, 8, 9, 3]
    assert inputs.positions.tolist() == [5, 6, 7, 9]
    assert inputs.slot_mapping.tolist() == [1, 2, 3, 5]
    assert inputs.page_table.tolist() == [[4, 0, 0], [2, 5, 1]]
    assert inputs.query_lengths == (3, 1)
    assert inputs.context_lengths == (8, 10)
    assert inputs.query_starts == (0, 3, 4)
    assert inputs.sample_indices.tolist() == [2]
    assert inputs.sample_indices.dtype == inputs.input_ids.dtype == torch.int64
    assert (inputs.num_tokens, inputs.num_rows) == (4, 2)


def test_tokens_of_a_row_as_rows_of_their_own() -> None:
    rows = [StepRow([7, 8, 9], 5, [4, 0], samples=True), StepRow([3], 9, [2, 5, 1], samples=True)]
    inputs = build_step_inputs(rows, 4, CPU)
    apart = one_row_a_token(inputs)
    pages = [4, 0, 0]
    expected = [StepRow([token], 5 + place, pages, samples=place == 2) for place, token in enumerate([7, 8, 9])]
    alike = build_step_inputs([*expected, rows[1]], 4, CPU)
    for field in ("input_ids", "positions", "slot_mapping", "page_table", "sample_indices"):
        assert torch.equal(getattr(apart, field), getattr(alike, field)), field
    assert (apart.query_lengths, apart.context_lengths) == (alike.query_lengths, alike.context_lengths)


def test_no_row_samples() -> None:
    inputs = build_step_inputs([StepRow([1, 2], 0, [0], samples=False)], 16, CPU)
    assert inputs.sample_indices.shape == (0,)
    assert inputs.sample_indices.dtype == torch.int64


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([StepRow([], 3, [0], samples=True)], "row 0 has no new token"),
        ([StepRow([1], 0, [0], samples=True), StepRow([1, 2], 3, [1], samples=True)], "row 1 has 1 pages of 4 for 5"),
    ],
)
def test_sch_01_a_step_never_has_a_row_without_new_tokens_or_pages(rows: list[StepRow], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_step_inputs(rows, 4, CPU)


SHAPE = KvCacheShape(num_layers=2, num_kv_heads=3, head_dim=4, page_size=5, dtype=torch.float16)


def test_the_pool_has_a_dummy_page_on_top() -> None:
    pool = KvCache(SHAPE, 6, CPU)
    assert pool.keys.shape == pool.values.shape == (2, 7, 5, 3, 4)
    assert pool.dummy_page_id == 6
    assert SHAPE.bytes_per_page == 2 * 2 * 5 * 3 * 4 * 2
    assert pool.num_bytes == pool.keys.nbytes + pool.values.nbytes == 7 * SHAPE.bytes_per_page
    assert not pool.keys.any()


def test_slots_are_views_in_page_order() -> None:
    pool = KvCache(SHAPE, 2, CPU)
    pool.write(1, torch.tensor([7, 0]), torch.ones(2, 3, 4).half(), torch.full((2, 3, 4), 2.0).half())
    assert pool.keys[1, 1, 2].eq(1).all()
    assert pool.key_slots(1)[7].eq(1).all()
    assert pool.value_slots(1)[0].eq(2).all()
    assert not pool.keys[0].any()


def test_smp_02_pages_of_a_failed_row_are_cleared_in_all_layers() -> None:
    pool = KvCache(SHAPE, 4, CPU)
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    pool.zero_pages([3, 1])
    pool.zero_pages([])
    for tensor in (pool.keys, pool.values):
        assert tensor[:, [1, 3]].eq(0).all()
        assert tensor[:, [0, 2, 4]].isnan().all()
    with pytest.raises(ValueError, match="must lie in"):
        pool.zero_pages([4])


@pytest.mark.parametrize(("num_pages", "page_size"), [(-1, 4), (3, 0)])
def test_a_pool_that_cannot_be(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        KvCache(KvCacheShape(1, 1, 2, page_size, torch.float32), num_pages, CPU)
