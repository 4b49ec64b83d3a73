"""How much of the prompts is found in a cache: one worker, two by prefix, two in turn. Pure cores, no processes."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from services.scheduler.router import Router
from services.scheduler.routing import RoundRobin, Routing, by_prefix
from services.wire.requests import Submit
from tests.unit.scheduler.core_driver import Driver, new_limits
from tests.unit.scheduler.fake_worker import VOCAB_SIZE, new_submit

NUM_PREFIXES, PREFIX_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 50, 64, 8, 8
CONCURRENCY = 16
REQUESTS_PER_PREFIX = 12


def workload(seed: int) -> list[Submit]:
    """Requests that share 50 prefixes, in no order."""
    numbers = Random(seed)
    prefixes = [[numbers.randrange(VOCAB_SIZE) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
    chosen = prefixes * REQUESTS_PER_PREFIX
    numbers.shuffle(chosen)
    return [
        new_submit(number, [*prefix, *(numbers.randrange(VOCAB_SIZE) for _ in range(OWN_TOKENS))], ANSWER_TOKENS)
        for number, prefix in enumerate(chosen, 1)
    ]


def hit_rate(submits: list[Submit], num_workers: int, routing: Routing, num_pages: int = 2000) -> tuple[float, float]:
    """Runs all, 16 at a time; the share of prompt tokens found in a cache, and the busiest worker's share of the work.

    The workers step in turn, as workers of one speed do.
    """
    router = Router(routing)
    drivers = {
        str(number).encode(): Driver(new_limits(num_pages, 4, max_rows=CONCURRENCY, token_budget=48, chunk_tokens=32))
        for number in range(num_workers)
    }
    for worker, driver in drivers.items():
        router.add_worker(worker, driver.core, token_ms=1.0)
    pending = deque(submits)
    while pending or router.num_open:
        while pending and router.num_open < CONCURRENCY:
            router.submit(pending.popleft(), list(drivers), b"t", b"d")
        for driver in drivers.values():
            _step(router, driver)
    counters = [driver.core.counters for driver in drivers.values()]
    cached, prompt = (sum(getattr(each, name) for each in counters) for name in ("cached_tokens", "prompt_tokens"))
    assert prompt == sum(len(submit.prompt_token_ids) // 4 for submit in submits)
    computed = [each.computed_tokens for each in counters]
    for driver in drivers.values():
        driver.core.check_invariants()
    assert all(backlog.load_ms == 0 for backlog in router.backlogs.values())
    return cached / prompt, max(computed) / sum(computed)


def _step(router: Router, driver: Driver) -> None:
    plan = driver.core.plan_step() if driver.core.can_plan() else None
    if plan is None:
        return
    driver.worker.run(plan)
    for item in driver.core.apply_result(driver.worker.deliver()):
        record = router.settle(item.request, 0.0)
        assert record is not None
        router.prefilled(record)


@pytest.mark.parametrize("seed", range(3))
def test_two_workers_find_nine_tenths_of_what_one_finds(seed: int) -> None:
    submits = workload(seed)
    alone, _ = hit_rate(submits, 1, by_prefix)
    routed, share = hit_rate(submits, 2, by_prefix)
    in_turn, _ = hit_rate(submits, 2, RoundRobin())
    assert routed >= 0.9 * alone
    assert routed > in_turn
    assert share < 0.6


def test_caches_that_hold_half_of_the_prefixes_each_hold_all_between_them() -> None:
    submits = workload(7)
    num_pages = 28 * PREFIX_TOKENS // 4 + CONCURRENCY * 6
    routed, _ = hit_rate(submits, 2, by_prefix, num_pages)
    in_turn, _ = hit_rate(submits, 2, RoundRobin(), num_pages)
    assert routed > 1.2 * in_turn


def test_one_prefix_that_all_want_is_not_left_to_one_worker() -> None:
    numbers = Random(1)
    prefix = [numbers.randrange(VOCAB_SIZE) for _ in range(PREFIX_TOKENS)]
    submits = [new_submit(number, [*prefix, number % VOCAB_SIZE], ANSWER_TOKENS) for number in range(1, 200)]
    routed, share = hit_rate(submits, 2, by_prefix)
    assert routed > 0.8
    assert share < 0.7
