"""What a worker may send as a result, and what it may get wrong."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest

from services.scheduler.step_result import ResultError
from services.wire.columns import pack_int32, unpack_int32
from services.wire.messages import Finish, StepResult
from tests.unit.scheduler.core_driver import Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit, next_token

PROMPT = list(range(1, 12))
COLUMNS = ("rows", "request_ids", "attempts", "first_indexes", "counts", "token_ids", "finishes")


def with_columns(result: StepResult, columns: dict[str, bytes]) -> StepResult:
    """The result with other columns, unchecked."""
    changed = copy(result)
    for name, column in columns.items():
        object.__setattr__(changed, name, column)
    return changed


def test_a_result_may_hold_several_ids_of_a_row() -> None:
    """What speculation will bring: the extra ids are tokens like others, and the next step computes them."""
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 20))
    driver.plan()
    result = driver.worker.deliver()
    row = driver.worker.rows[0]
    ids = unpack_int32(result.token_ids)
    for _ in range(7):  # as many as to need new pages for one step
        ids.append(next_token(row.sampling, bytes(row.tokens)))
        row.tokens += pack_int32([ids[-1]])
    for item in driver.core.apply_result(replace(result, counts=pack_int32([8]), token_ids=pack_int32(ids))):
        driver.record(item)
    driver.run()
    driver.check_answer(answer)
    assert driver.worker.step_tokens[1] == [8]


def test_several_ids_beyond_the_end_are_cut() -> None:
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 3))
    driver.plan()
    result = driver.worker.deliver()
    changed = replace(result, counts=pack_int32([5]), token_ids=pack_int32([1, 2, 3, 4, 5]))
    for item in driver.core.apply_result(changed):
        driver.record(item)
    assert (answer.token_ids, answer.finish) == ([1, 2, 3], Finish.LENGTH)
    driver.run()


@pytest.mark.parametrize(
    "changes",
    [
        {"request_ids": b"x" * 16},
        {"attempts": pack_int32([3])},
        {"first_indexes": pack_int32([1])},
        {"counts": pack_int32([0]), "token_ids": b""},
        dict.fromkeys(COLUMNS, b""),
    ],
)
def test_an_answer_that_cannot_be_this_rows_fails_this_row(changes: dict[str, bytes]) -> None:
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 5))
    driver.plan()
    for item in driver.core.apply_result(with_columns(driver.worker.deliver(), changes)):
        driver.record(item)
    assert answer.finish is Finish.INTERNAL_ERROR
    driver.run()
    assert driver.core.ledger.cache.num_pages == 0


def test_another_number_of_ids_than_plans_ahead_assumed_fails_the_row() -> None:
    driver = Driver(new_limits(64, 4, plans_ahead=1))
    answer = driver.submit(new_submit(1, PROMPT, 9))
    driver.plan()
    result = driver.worker.deliver()
    for item in driver.core.apply_result(replace(result, counts=pack_int32([2]), token_ids=pack_int32([1, 2]))):
        driver.record(item)
    assert answer.finish is Finish.INTERNAL_ERROR
    driver.run()


def test_a_result_out_of_turn_is_a_fault_of_the_worker() -> None:
    driver = Driver(new_limits(64, 4))
    driver.submit(new_submit(1, PROMPT, 5))
    driver.plan()
    result = driver.worker.deliver()
    for wrong in (replace(result, step=1), replace(result, epoch=5)):
        with pytest.raises(ResultError, match="not the one awaited"):
            driver.core.apply_result(wrong)
    with pytest.raises(ResultError, match="counts add up"):
        driver.core.apply_result(replace(result, counts=pack_int32([2])))
    driver.core.apply_result(result)
    with pytest.raises(ResultError):
        driver.core.apply_result(result)


def test_a_result_that_names_a_row_twice_is_a_fault_of_the_worker() -> None:
    driver = Driver(new_limits(64, 4))
    driver.submit(new_submit(1, PROMPT, 5))
    driver.plan()
    result = driver.worker.deliver()
    with pytest.raises(ResultError, match="twice"):
        driver.core.apply_result(with_columns(result, {name: 2 * getattr(result, name) for name in COLUMNS}))
