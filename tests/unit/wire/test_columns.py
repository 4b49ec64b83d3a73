"""Columns: many numbers as one run of bytes."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.wire.columns import (
    all_below,
    may_hold,
    pack_int32,
    pack_request_ids,
    plus_int32,
    split_by_counts,
    unpack_float32,
    unpack_int32,
    unpack_request_ids,
)
from services.wire.errors import ProtocolError


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_int32_columns_are_little_endian_and_come_back(values: list[int]) -> None:
    column = pack_int32(values)
    assert column == b"".join(value.to_bytes(4, "little", signed=True) for value in values)
    assert unpack_int32(column) == values


@given(st.lists(st.integers(0, 2**30)), st.integers(0, 2**30 - 1))
def test_a_number_is_added_to_each_item_of_a_column(values: list[int], number: int) -> None:
    assert unpack_int32(plus_int32(pack_int32(values), number)) == [value + number for value in values]


@given(st.lists(st.integers(0, 2**31 - 1)), st.integers(1, 2**31))
def test_the_bound_of_a_column_is_that_of_its_items(values: list[int], bound: int) -> None:
    assert all_below(pack_int32(values), bound) == all(value < bound for value in values)
    for value in values:
        assert not all_below(pack_int32(values), max(value, 1)) or value == 0
    assert all_below(pack_int32(values), max(values, default=0) + 1)


@given(st.lists(st.integers(0, 600)), st.lists(st.integers(0, 600)))
def test_a_number_that_a_column_holds_is_never_missed(values: list[int], numbers: list[int]) -> None:
    if not set(values).isdisjoint(numbers):
        assert may_hold(pack_int32(values), numbers)
    assert not may_hold(pack_int32(values), [2**31 - 1])


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**70])
def test_numbers_that_do_not_fit_are_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_int32([0, value])


def test_request_ids_come_back_and_odd_lengths_are_refused() -> None:
    ids = [os.urandom(16) for _ in range(5)]
    assert unpack_request_ids(pack_request_ids(ids)) == ids
    assert unpack_request_ids(b"") == []
    with pytest.raises(ProtocolError):
        unpack_request_ids(bytes(17))


@pytest.mark.parametrize("unpack", [unpack_int32, unpack_float32])
def test_columns_of_numbers_are_whole(unpack: Callable[[bytes], object]) -> None:
    with pytest.raises(ProtocolError, match="5 bytes are no column of 4-byte numbers"):
        unpack(bytes(5))


@given(st.lists(st.lists(st.integers(0, 9), max_size=4)))
def test_runs_are_cut_as_they_were_joined(runs: list[list[int]]) -> None:
    joined = [value for run in runs for value in run]
    assert split_by_counts(joined, [len(run) for run in runs]) == runs


@pytest.mark.parametrize("counts", [[1], [4], [-1, 4], [2, 2]])
def test_counts_that_do_not_add_up_are_refused(counts: list[int]) -> None:
    with pytest.raises(ProtocolError):
        split_by_counts([1, 2, 3], counts)
