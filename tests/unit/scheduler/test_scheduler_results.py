"""What a worker may send as a result, and what it may get wrong."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from random import Random

import pytest

from services.scheduler.step_result import ResultError
from services.wire.columns import pack_int32, unpack_int32
from services.wire.finish import Finish
from services.wire.steps import StepResult
from tests.unit.scheduler.core_driver import Answer, Driver, new_limits
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


@pytest.mark.parametrize("plans_ahead", range(5))
@pytest.mark.parametrize("num_pages", [400, 30])
def test_ids_that_are_forced_at_random_give_the_same_answers_with_any_number_of_plans_ahead(
    plans_ahead: int, num_pages: int
) -> None:
    """With few pages requests are retracted while plans are out that give nothing, or several ids."""
    driver = Driver(new_limits(num_pages, 2, plans_ahead=plans_ahead), is_reckless=True)
    driver.worker.jumps = Random(plans_ahead)
    submits = [new_submit(n, PROMPT[: n % 7 + 1], 40, num_logprobs=n % 3 - 1) for n in range(1, 7)]
    answers = [driver.submit(submit) for submit in submits]
    driver.run()
    assert driver.worker.num_jumps > 20
    assert bool(driver.core.counters.retracted) == (num_pages == 30)
    for answer in answers:
        driver.check_answer(answer)


def several_ids_with_plans_ahead(num_ids: int, plans_ahead: int) -> tuple[Driver, Answer]:
    """A driver whose first result, delivered, gave `num_ids` ids while `plans_ahead` plans counted on one."""
    driver = Driver(new_limits(64, 4, plans_ahead=plans_ahead))
    answer = driver.submit(new_submit(1, PROMPT, 30))
    jumps = Random(0)
    jumps.random = lambda: 1.0  # type: ignore[method-assign]
    jumps.randrange = lambda *_: num_ids  # type: ignore[method-assign]
    driver.worker.jumps = jumps
    plan = driver.core.plan_step()
    assert plan is not None
    driver.worker.run(plan)
    driver.worker.jumps = None
    driver.plan()
    driver.deliver()
    return driver, answer


def test_plans_that_counted_on_one_id_give_none_and_the_next_one_catches_up() -> None:
    """Five ids at once: the two plans that were out compute two of them, the next plan the other three."""
    driver, answer = several_ids_with_plans_ahead(5, 2)
    assert len(answer.token_ids) == 5
    assert driver.worker.step_tokens == [[11], [1], [1]]
    driver.plan()
    assert driver.worker.step_tokens[3:] == [[3]]
    assert driver.deliver() == driver.deliver() == []
    assert len(driver.deliver()[0].token_ids) == 1
    driver.run()
    driver.check_answer(answer)


def test_a_plan_that_ends_at_the_last_of_several_ids_samples_after_it() -> None:
    """Two ids at once, three plans out: the first of them gives none, the others one each."""
    driver, answer = several_ids_with_plans_ahead(2, 3)
    assert [len(item.token_ids) for _ in range(3) for item in driver.deliver()] == [1, 1]
    assert driver.worker.step_tokens[4:] == []
    driver.run()
    driver.check_answer(answer)


def test_an_id_from_a_plan_whose_token_is_known_already_fails_the_row() -> None:
    driver, answer = several_ids_with_plans_ahead(3, 1)
    result = driver.worker.deliver()
    assert not result.rows
    columns = {"rows": pack_int32([0]), "request_ids": answer.request.request_id, "attempts": pack_int32([0])}
    columns |= {"first_indexes": pack_int32([3]), "counts": pack_int32([1]), "token_ids": pack_int32([4])}
    for item in driver.core.apply_result(with_columns(result, columns | {"finishes": b"\0"})):
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
