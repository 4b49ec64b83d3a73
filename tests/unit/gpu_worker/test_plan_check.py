"""The rules of a plan: rows that only go on are let through at once, and never one that breaks a rule."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.plan_check import NOT_STARTED, PlannedRows, check_rows, only_go_on

GOES_ON = (5, 6, True, 6, 4, 5, 16, 2**62, False, 0, True, False)  # as `PlannedRows` has it, but for the row's number
VALUES = (
    [4, 6], [5, 7], [False], [5, 7], [5, 6], [NOT_STARTED, 4, 6], [5], [3], [True], [1], [False], [True],
)  # fmt: skip
ROWS = st.lists(
    st.dictionaries(st.sampled_from(range(len(VALUES))), st.integers(0, 2), max_size=3).map(
        lambda changes: [
            VALUES[index][changes[index] % len(VALUES[index])] if index in changes else usual
            for index, usual in enumerate(GOES_ON)
        ]
    ),
    min_size=1,
    max_size=3,
)
BOOLEANS = (2, 8, 10, 11)


def planned(rows: list[list[int]]) -> PlannedRows:
    columns: list[Any] = [
        np.array(column, dtype=np.bool_ if index in BOOLEANS else np.int64)
        for index, column in enumerate(zip(*rows, strict=True))
    ]
    return PlannedRows(np.arange(len(rows)), *columns)


@given(ROWS)
@settings(max_examples=300, deadline=None)
def test_rows_that_only_go_on_break_no_rule(rows: list[list[int]]) -> None:
    plan = planned(rows)
    if only_go_on(plan) and not plan.num_proposed.any():
        check_rows(plan)


def test_decoding_rows_only_go_on() -> None:
    assert only_go_on(planned([list(GOES_ON)] * 2))
