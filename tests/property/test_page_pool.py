"""PagePool against a naive set, for any order of allocations and frees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.page_pool import PagePool


@given(st.integers(1, 20), st.lists(st.integers(0, 12), max_size=60), st.randoms(use_true_random=False))
def test_pool_equals_a_set(num_pages: int, sizes: list[int], random: object) -> None:
    pool = PagePool(num_pages)
    free = set(range(num_pages))
    held: list[list[int]] = []
    for turn, size in enumerate(sizes):
        if turn % 3 == 2 and held:
            pages = held.pop(size % len(held))
            pool.free(pages)
            free |= set(pages)
        else:
            allocated = pool.allocate(size)
            assert (allocated is None) == (size > len(free))
            if allocated is not None:
                assert len(allocated) == len(set(allocated)) == size
                assert set(allocated) <= free
                free -= set(allocated)
                held.append(allocated)
        assert pool.free_pages() == free
        assert pool.num_free == len(free)


def test_pages_go_out_in_order_and_the_last_one_freed_is_next() -> None:
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([1])
    assert pool.allocate(1) == [1]


def test_double_free_raises() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages is not None
    pool.free(pages)
    with pytest.raises(ValueError, match="page 0 is freed twice"):
        pool.free(pages)


@pytest.mark.parametrize("page", [-1, 2])
def test_a_page_of_another_pool_raises(page: int) -> None:
    with pytest.raises(ValueError, match="outside the pool"):
        PagePool(2).free([page])


def test_nonsense_sizes_raise() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)
    with pytest.raises(ValueError, match="cannot allocate -1"):
        PagePool(1).allocate(-1)
