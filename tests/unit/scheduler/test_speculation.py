"""Who proposes how much, beside whom, and when a plan waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.runtime.config import Settings
from services.scheduler.proposer import (
    FIRST_IDS,
    FIRST_REST_STEPS,
    MOST_LOST_STEPS,
    MOST_REST_STEPS,
    MOST_WON_STEPS,
    PROPOSALS_PER_STEP,
    Proposer,
    SpeculationLimits,
)
from services.scheduler.step_result import ResultError
from services.scheduler.workers import limits_of
from services.wire.columns import pack_int32, unpack_int32
from services.wire.finish import Finish
from tests.unit.scheduler.core_driver import Answer, Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit
from tests.unit.scheduler.scheduler_group import worker_card

Wish = tuple[str, object]

PERIODIC = -1000  # a seed whose text repeats itself, but for one token in so many
RANDOM = 7
PHRASE = [1, 2, 3, 4, 1, 2, 3, 4]


def new_driver(plans_ahead: int = 1, num_pages: int = 400, **limits: int) -> Driver:
    speculation = SpeculationLimits(limits.pop("most_ids", 8), 2, limits.pop("step_tokens", 32))
    return Driver(new_limits(num_pages, 4, speculation, plans_ahead=plans_ahead, token_budget=64, **limits))


def submit(driver: Driver, number: int, seed: int = PERIODIC, max_tokens: int = 100, wish: Wish = ("", 0)) -> Answer:
    wishes: dict[str, Any] = {name: value for name, value in (wish,) if name}
    return driver.submit(new_submit(number, PHRASE, max_tokens, seed=seed, **wishes))


@pytest.mark.parametrize("plans_ahead", [0, 1, 4])
def test_an_answer_that_repeats_itself_takes_a_fraction_of_the_steps(plans_ahead: int) -> None:
    with_, without = new_driver(plans_ahead), Driver(new_limits(400, 4, plans_ahead=plans_ahead))
    answers = [submit(driver, 1) for driver in (with_, without)]
    for driver, answer in zip((with_, without), answers, strict=True):
        driver.run()
        driver.check_answer(answer)
    assert answers[0].token_ids == answers[1].token_ids
    assert with_.core.counters.steps < without.core.counters.steps / 3
    counters, usage = with_.core.counters, answers[0].request.usage
    assert counters.accepted_tokens > 60
    used = usage.counters(counters, 0)
    assert (used["proposed_tokens"], used["accepted_tokens"]) == (counters.proposed_tokens, counters.accepted_tokens)
    assert "proposed_tokens" not in answers[1].request.usage.counters(without.core.counters, 0)


@pytest.mark.parametrize("wish", [("has_rules", True), ("num_logprobs", 0), ("grammar", "a")])
def test_who_wants_what_cannot_be_verified_proposes_nothing(wish: Wish) -> None:
    driver = new_driver()
    answer = submit(driver, 1, wish=wish)
    driver.answer_asks()
    driver.run()
    driver.check_answer(answer)
    assert driver.core.counters.proposed_tokens == driver.core.speculation.num_watched == 0


def test_who_never_repeats_itself_plans_ahead_and_soon_rests() -> None:
    driver = new_driver()
    answer = submit(driver, 1, RANDOM, max_tokens=300)
    num_ahead = 0
    while answer.finish is Finish.NONE:
        driver.plan()
        num_ahead += driver.core.num_in_flight > 1
        driver.deliver()
    driver.check_answer(answer)
    assert num_ahead > 250
    assert driver.core.counters.proposed_tokens < 20


def test_a_plan_waits_for_results_while_somebody_has_something_to_propose() -> None:
    driver = new_driver(plans_ahead=2)
    answer = submit(driver, 1)
    while not driver.core.counters.accepted_tokens:
        driver.plan()
        driver.deliver()
    driver.plan()
    assert driver.core.num_in_flight == 1
    driver.run()
    driver.check_answer(answer)


def test_a_step_that_is_large_already_holds_no_proposals_and_all_go_in_lockstep() -> None:
    driver = new_driver(step_tokens=8, max_rows=8, chunk_tokens=64)
    answers = [submit(driver, number, max_tokens=200) for number in range(1, 6)]
    for _ in range(40):
        driver.plan()
        driver.deliver()
    assert driver.core.counters.proposed_tokens == driver.core.speculation.num_watched == 0
    assert all(answer.request.in_lockstep for answer in answers)
    driver.abort(answers[0])
    driver.run()
    assert driver.core.counters.accepted_tokens > 0
    assert max(map(sum, driver.worker.step_tokens[10:])) <= 8
    for answer in answers[1:]:
        driver.check_answer(answer)


def test_proposals_share_what_a_step_may_hold() -> None:
    driver = new_driver(step_tokens=12, max_rows=4)
    answers = [submit(driver, number, max_tokens=150) for number in range(1, 5)]
    driver.run()
    assert max(map(sum, driver.worker.step_tokens[3:])) == 12
    assert driver.core.counters.accepted_tokens > 100
    for answer in answers:
        driver.check_answer(answer)


def test_a_prompt_that_is_never_cut_finds_its_room_beside_proposals() -> None:
    speculation = SpeculationLimits(8, 2, 32)
    limits = new_limits(
        30, 4, speculation, chunk_tokens=-1, max_rows=2, token_budget=122, plans_ahead=1, max_model_len=120
    )
    driver = Driver(limits)
    first = submit(driver, 1, max_tokens=60)
    for _ in range(6):
        driver.plan()
        driver.deliver()
    second = driver.submit(new_submit(2, list(range(45)), 5))
    while second.finish is Finish.NONE and first.finish is Finish.NONE:
        driver.plan()
        driver.deliver()
    assert second.finish is Finish.LENGTH
    driver.run()
    driver.check_answer(first)


def test_proposals_take_no_page_that_another_may_need() -> None:
    """The pool just holds both answers: nobody is retracted for a guess."""
    driver = new_driver(num_pages=2 * 14, max_rows=2)
    answers = [submit(driver, number, max_tokens=48) for number in (1, 2)]
    driver.run()
    assert driver.core.counters.retracted == 0
    for answer in answers:
        driver.check_answer(answer)


def test_a_result_with_more_ids_than_were_proposed_fails_the_row() -> None:
    driver = new_driver(plans_ahead=0)
    answer = submit(driver, 1)
    while not answer.request.num_proposed:
        driver.plan()
        if not answer.request.num_proposed:
            driver.deliver()
    result = driver.worker.deliver()
    num_ids = answer.request.num_proposed + 2
    forged = replace(result, counts=pack_int32([num_ids]), token_ids=pack_int32([0] * num_ids))
    (item,) = driver.core.apply_result(forged)
    assert item.finish is Finish.INTERNAL_ERROR
    driver.core.check_invariants()
    with pytest.raises(ResultError):
        driver.core.apply_result(forged)


def test_proposals_grow_with_success_and_shrink_without() -> None:
    proposer = Proposer(SpeculationLimits(16, 2, 32))
    assert proposer.num_ids == FIRST_IDS
    proposer.learn(FIRST_IDS, FIRST_IDS, 0)
    assert proposer.num_ids == 2 * FIRST_IDS
    proposer.learn(8, 8, 1)
    proposer.learn(16, 16, 2)
    assert proposer.num_ids == 16
    proposer.learn(2, 2, 3)  # there was no room for more
    assert proposer.num_ids == 16
    proposer.learn(16, 6, 4)
    assert proposer.num_ids == 7
    proposer.learn(7, 0, 5)
    assert proposer.num_ids == FIRST_IDS
    assert Proposer(SpeculationLimits(2, 2, 32)).num_ids == 2


def test_who_loses_rests_longer_each_time_until_it_gains() -> None:
    """What stands saves a step, and each proposal costs a sixth of one."""
    num_to_rest = MOST_LOST_STEPS * PROPOSALS_PER_STEP // 4
    proposer = Proposer(SpeculationLimits(16, 2, 32))
    for step in range(4):
        proposer.learn(4, 3, step)  # what was gained counts up to a bound
    num_until_rest = (MOST_WON_STEPS + MOST_LOST_STEPS) * PROPOSALS_PER_STEP // 4
    for step in range(4, 4 + num_until_rest):
        assert proposer.rests_until == 0
        proposer.learn(4, 0, step)
    assert proposer.rests_until == 3 + num_until_rest + FIRST_REST_STEPS
    for _ in range(num_to_rest):
        proposer.learn(4, 0, 100)
    assert proposer.rests_until == 100 + 2 * FIRST_REST_STEPS
    proposer.learn(5, 1, 200)  # one that stands is worth more than five cost
    for _ in range(num_to_rest + 1):
        proposer.learn(4, 0, 300)
    assert proposer.rests_until == 300 + FIRST_REST_STEPS
    for _ in range(20 * num_to_rest):
        proposer.learn(4, 0, 400)
    assert proposer.rests_until == 400 + MOST_REST_STEPS


def test_waiting_in_vain_costs_as_much_as_one_proposal() -> None:
    proposer = Proposer(SpeculationLimits(16, 2, 32))
    for step in range(MOST_LOST_STEPS * PROPOSALS_PER_STEP):
        assert proposer.rests_until == 0
        proposer.note_vain_wait(step)
    assert proposer.rests_until > step
    assert proposer.num_ids == FIRST_IDS


def test_an_answer_that_goes_on_elsewhere_is_the_same_and_proposes_from_what_it_has() -> None:
    """A request that a lost worker had begun is submitted again with its output so far."""
    first, second = new_driver(), new_driver()
    whole = submit(first, 1)
    first.run()
    again = new_submit(1, PHRASE, 100, seed=PERIODIC, output_token_ids=whole.token_ids[:40], attempt=1)
    resumed = second.submit(again)
    second.run()
    second.check_answer(resumed)
    assert resumed.token_ids == whole.token_ids
    assert second.core.counters.accepted_tokens > 30


def test_the_settings_reach_the_core() -> None:
    assert limits_of(worker_card(), Settings()).speculation is None
    settings = Settings(speculation="ngram", speculation_tokens=5, speculation_min_match=2)
    limits = limits_of(worker_card(), settings)
    assert limits.speculation == SpeculationLimits(5, 2, 32)


def test_a_plan_names_the_proposals_of_each_row() -> None:
    """Rows in lockstep stand first, with none."""
    driver = new_driver(plans_ahead=0)
    submit(driver, 1, RANDOM, wish=("has_rules", True))
    answer = submit(driver, 2)
    while True:
        assert driver.core.can_plan()
        plan = driver.core.plan_step()
        assert plan is not None
        plan.check()
        driver.worker.run(plan)
        if plan.proposal_ids:
            break
        driver.deliver()
    counts = unpack_int32(plan.proposal_counts)
    assert len(counts) == len(plan.samples) == 2
    assert unpack_int32(plan.rows)[1] == answer.request.row
    assert counts == [0, answer.request.num_proposed]
    assert unpack_int32(plan.num_new_tokens) == [1, 1 + answer.request.num_proposed]
