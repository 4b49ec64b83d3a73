"""The core against solo runs: any order of events, any number of plans ahead, shared prefixes, tiny pools."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.scheduler.admission import RequestRefusedError
from services.scheduler.proposer import SpeculationLimits
from services.scheduler.request import is_producing
from services.wire.finish import Finish
from services.wire.request_params import PLAIN_PROMPT, PromptParams, Task
from tests.unit.scheduler.core_driver import Answer, Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit

WISHES = [
    PromptParams(num_logprobs=0),
    PromptParams(num_logprobs=2, logprobs_from=14),
    PromptParams(task=Task.EMBED_LAST),
    PromptParams(task=Task.EMBED_MEAN),
    PromptParams(task=Task.EMBED_LAST, num_logprobs=1),
]
PREFIXES = [[1] * 9, [1] * 5 + [2] * 12, [3, 4, 5, 6] * 5, []]


class CoreMachine(RuleBasedStateMachine):
    """Small pools, so that admission waits, retraction happens and the tree is evicted all the time."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        pool_tokens=st.integers(40, 120),
        plans_ahead=st.integers(0, 4),
        max_rows=st.integers(1, 6),
        chunk=st.sampled_from([(3, 0), (16, 0), (16, 5), (3, 40), (-1, 0)]),
        is_reckless=st.booleans(),
        jump_seed=st.none() | st.integers(0, 1000),
        speculation=st.none() | st.builds(SpeculationLimits, st.integers(1, 5), st.integers(1, 3), st.integers(2, 12)),
    )
    def start(
        self,
        page_size: int,
        pool_tokens: int,
        plans_ahead: int,
        max_rows: int,
        chunk: tuple[int, int],
        is_reckless: bool,
        jump_seed: int | None,
        speculation: SpeculationLimits | None,
    ) -> None:
        self.driver = Driver(
            new_limits(
                max(pool_tokens // page_size, 3),
                page_size,
                speculation,
                plans_ahead=plans_ahead,
                max_rows=max_rows,
                chunk_tokens=chunk[0],
                chunk_context=chunk[1],
                token_budget=200 if chunk[0] == -1 else 10,
            ),
            is_reckless,
        )
        self.driver.worker.jumps = None if jump_seed is None else Random(jump_seed)
        self.numbers = itertools.count(1)

    @property
    def open(self) -> list[Answer]:
        return [answer for answer in self.driver.answers.values() if answer.finish is Finish.NONE]

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=20),
        max_tokens=st.integers(0, 90),
        stop_token_ids=st.sampled_from([(), (7,), tuple(range(10))]),
        min_tokens=st.sampled_from([0, 5]),
        num_choices=st.sampled_from([1, 1, 3]),
        tenant=st.sampled_from(["", "a"]),
        priority=st.integers(-1, 1),
        cache_root=st.sampled_from([b"", b"salt"]),
        num_logprobs=st.sampled_from([-1, -1, 0, 3]),
        seed=st.sampled_from([7, -3, -9]),
        has_rules=st.sampled_from([False, False, True]),
        grammar=st.sampled_from([None, None, "a", "b"]),
        prompt=st.sampled_from([PLAIN_PROMPT] * 3 + WISHES),
    )
    def submit(
        self,
        prefix: list[int],
        tail: list[int],
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        num_choices: int,
        **other: object,
    ) -> None:
        first = next(self.numbers)
        for choice in range(num_choices):
            number = first if choice == 0 else next(self.numbers)
            submit = new_submit(
                number, prefix + tail, max_tokens, stop_token_ids, group_id=first, choice=choice, **other
            )
            if len(prefix + tail) + is_producing(submit) <= self.driver.limits.max_total_tokens:
                self.driver.submit(submit)
            else:
                with pytest.raises(RequestRefusedError, match=f"{len(prefix + tail)} tokens"):
                    self.driver.submit(submit)

    @rule(is_good=st.booleans() | st.just(True))
    def answer_asks(self, is_good: bool) -> None:
        for request in self.driver.answer_asks("" if is_good else "no sentence"):
            assert request.is_alive == is_good

    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.worker.results)
    @rule(count=st.integers(1, 3))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.driver.worker.results))):
            self.driver.deliver()

    @precondition(lambda self: self.open)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        self.driver.abort(self.open[choice % len(self.open)])

    @precondition(lambda self: self.driver.answers)
    @rule(choice=st.integers(0, 1000), end_index=st.integers(0, 12))
    def stop_found(self, choice: int, end_index: int) -> None:
        answers = list(self.driver.answers.values())
        answer = answers[choice % len(answers)]
        is_open = answer.finish is Finish.NONE
        num_known = len(answer.token_ids)
        assert self.driver.stop_found(answer, end_index) == (is_open and 0 < end_index <= num_known)

    @precondition(lambda self: self.open)
    @rule(choice=st.integers(0, 1000))
    def poison(self, choice: int) -> None:
        self.driver.worker.nan_requests.add(self.open[choice % len(self.open)].request.request_id)

    @rule()
    def flush(self) -> None:
        self.driver.core.flush_cache()
        self.driver.core.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        for answer in self.driver.answers.values():
            self.driver.check_answer(answer)
            is_poisoned = answer.request.request_id in self.driver.worker.nan_requests
            assert (answer.finish is not Finish.NUMERICAL_ERROR) or is_poisoned
            assert answer.finish is not Finish.INTERNAL_ERROR
        self.driver.core.flush_cache()
        assert self.driver.core.ledger.pool.num_free == self.driver.limits.num_pages


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(("page_size", "plans_ahead"), [(1, 0), (4, 1), (16, 4)])
def test_sch_05_ten_thousand_random_steps_leave_free_plus_cached_equal_to_total(
    page_size: int, plans_ahead: int
) -> None:
    """Pool of 256 tokens; every step is one event, and the sum of pages is checked after each."""
    random = Random(page_size)
    driver = Driver(new_limits(256 // page_size, page_size, plans_ahead=plans_ahead), is_reckless=True)
    open_answers: list[Answer] = []
    done: list[Answer] = []
    for step in range(10_000):
        event = random.random()
        open_answers = [answer for answer in open_answers if answer.finish is Finish.NONE]
        if event < 0.12 and len(open_answers) < 30:
            prompt = random.choice(PREFIXES) + [random.randrange(4) for _ in range(random.randrange(1, 60))]
            stop_ids = tuple(random.sample(range(50), random.choice([0, 1, 3])))
            answer = driver.submit(new_submit(step + 1, prompt, random.randrange(1, 120), stop_ids))
            open_answers.append(answer)
            done.append(answer)
        elif event < 0.15 and open_answers:
            driver.abort(random.choice(open_answers))
        elif event < 0.17 and open_answers:
            driver.stop_found(random.choice(open_answers), random.randrange(0, 20))
        elif event < 0.175 and open_answers:
            driver.worker.nan_requests.add(random.choice(open_answers).request.request_id)
        elif event < 0.18:
            driver.core.flush_cache()
        elif driver.worker.results and event < 0.6:
            driver.deliver()
        else:
            driver.plan()
    assert driver.core.counters.retracted > 100
    driver.run()
    for answer in done:
        driver.check_answer(answer)
    assert len({answer.finish for answer in done}) >= 5
    driver.core.flush_cache()
    assert driver.core.ledger.pool.num_free == driver.limits.num_pages
