"""Who comes first when the queue is long: tenants, priorities, age; and time limits in every state."""

from __future__ import annotations

import pytest

from services.scheduler.policy import AGE_TURN_PASSES
from services.wire.finish import Finish
from services.wire.requests import Refused
from services.wire.steps import CompileGrammar, GrammarCompiled, StepPlan
from tests.unit.scheduler.core_driver import Answer, Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit
from tests.unit.scheduler.scheduler_group import id_of, running_pipeline, worker_card

PROMPT = list(range(1, 12))


def one_at_a_time() -> Driver:
    return Driver(new_limits(400, 1, max_rows=1, max_waiting=10_000))


def steps_until_end(driver: Driver, answer: Answer) -> int:
    steps = 0
    while not answer.finish:
        driver.plan()
        driver.deliver()
        steps += 1
    return steps


@pytest.mark.parametrize("num_flooding", [10, 100, 400])
def test_a_tenant_that_floods_the_queue_does_not_hold_up_another(num_flooding: int) -> None:
    """However long the one has been waiting with however many, the other's request is next, or next but one."""
    driver = one_at_a_time()
    for number in range(1, num_flooding + 1):
        driver.submit(new_submit(number, [number % 50, *PROMPT], 2, tenant="flood"))
    for _ in range(min(num_flooding, 60)):  # half of them, or until everybody who waits is old
        driver.plan()
        driver.deliver()
    for number in range(5):
        answer = driver.submit(new_submit(10_000 + number, [40, number, *PROMPT], 2, tenant="quiet"))
        assert steps_until_end(driver, answer) <= 6
    driver.run()


def test_a_lower_number_goes_first_however_long_the_others_have_waited() -> None:
    driver = one_at_a_time()
    for number in range(1, 101):
        driver.submit(new_submit(number, [number % 50, *PROMPT], 2, priority=5))
    for _ in range(60):
        driver.plan()
        driver.deliver()
    urgent = driver.submit(new_submit(1000, [40, *PROMPT], 2, priority=-1))
    assert steps_until_end(driver, urgent) <= 6
    driver.run()


@pytest.mark.parametrize(("tenant", "priority"), [("first", 9), ("late", 0)])
def test_nobody_starves_behind_those_who_always_come_first(tenant: str, priority: int) -> None:
    """One that is outranked for ever, as new requests before it never end, has its turn by age."""
    driver = one_at_a_time()
    number = 1
    if tenant == "late":  # it was served much, and the others come anew each time
        for _ in range(20):
            driver.submit(new_submit(number, [number % 50, *PROMPT], 2, tenant="late"))
            number += 1
    driver.submit(new_submit(5000, [1] * 9, 2, tenant="first", priority=0))
    driver.plan()
    outranked = driver.submit(new_submit(6000, [2] * 9, 2, tenant=tenant, priority=priority))
    passes = 0
    while not outranked.finish:
        for _ in range(2):
            driver.submit(new_submit(7000 + number, [3, number % 50, *PROMPT], 1, tenant="first", priority=0))
            number += 1
        driver.plan()
        driver.deliver()
        passes += 1
        assert passes <= 30 * AGE_TURN_PASSES
    driver.run()


def test_siblings_keep_their_priority_and_their_tenant() -> None:
    """All answers of one request, and those that waited for a grammar, stand in the line of their rank."""
    driver = one_at_a_time()
    low = [driver.submit(new_submit(number, [number, *PROMPT], 2, priority=3)) for number in (1, 2)]
    high = [
        driver.submit(new_submit(10 + choice, [9] * 30, 2, group_id=10, choice=choice, priority=1, grammar="a+"))
        for choice in range(2)
    ]
    driver.answer_asks()
    order: list[Answer] = []
    while len(order) < 4:
        driver.plan()
        driver.deliver()
        order += [answer for answer in (*low, *high) if answer.finish and answer not in order]
    assert order == [*high, *low]


@pytest.mark.parametrize("state", ["waiting", "running", "held", "compiled"])
def test_a_time_limit_ends_a_request_in_every_state(state: str) -> None:
    """Compiling and paused ones are tested beside their features."""
    with running_pipeline(worker_card(max_rows=1), plans_ahead=0) as pipeline:
        pipeline.is_working = False
        prompt = list(range(1, 31))
        pipeline.tokenizer.send(new_submit(2, prompt, 50, deadline_ms=150 if state == "running" else 0))
        pipeline.group.pump(lambda: bool(pipeline.gpu_worker.of(StepPlan)))
        number = 2 if state == "running" else 3
        if state == "held":
            pipeline.tokenizer.send(new_submit(3, prompt, 50, group_id=2, choice=1, deadline_ms=150))
        elif state != "running":
            grammar = "a+" if state == "compiled" else None
            pipeline.tokenizer.send(new_submit(3, PROMPT, 50, grammar=grammar, deadline_ms=150))
        if state == "compiled":
            pipeline.group.pump(lambda: bool(pipeline.gpu_worker.of(CompileGrammar)))
            pipeline.gpu_worker.send(GrammarCompiled(id_of(3), 0))
        pipeline.group.pump(lambda: pipeline.finish_of(number) is Finish.TIMEOUT)
        assert not pipeline.tokenizer.of(Refused)
        pipeline.is_working = True
        pipeline.work_off()
