"""Decodes in lockstep against the same decodes row by row: the same events bring the same items after each result."""

from __future__ import annotations

from random import Random

import pytest

from services.scheduler.formation import Formation
from services.scheduler.outcomes import Produced, TokenRun
from services.scheduler.request import Request
from services.scheduler.token_batch import TokenBatch
from services.wire.answers import TokensProduced
from services.wire.columns import pack_int32, split_by_counts, unpack_int32, unpack_request_ids
from services.wire.finish import Finish
from tests.unit.scheduler.core_driver import Answer, Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit

NUM_EVENTS = 1500


def told(items: list[Produced]) -> list[tuple[bytes, int, list[int], Finish]]:
    return sorted((item.request.request_id, item.first_index, item.token_ids, item.finish) for item in items)


def cursors(answer: Answer) -> tuple[object, ...]:
    request = answer.request
    return (
        request.state, request.num_output, request.num_computed, request.num_planned, request.num_expected,
        request.last_step, len(request.pages), request.key(request.num_tokens),
    )  # fmt: skip


class Pair:
    """One core in lockstep and one that is not, with the same events."""

    def __init__(self, page_size: int, plans_ahead: int) -> None:
        limits = new_limits(4096 // page_size, page_size, plans_ahead=plans_ahead, max_rows=12, token_budget=40)
        self.drivers = (Driver(limits), Driver(limits, in_lockstep=False))
        self.answers: list[tuple[Answer, Answer]] = []
        self.num_in_runs = self.num_alone = 0

    def submit(self, number: int, random: Random) -> None:
        prompt = [random.randrange(9) for _ in range(random.randrange(1, 30))]
        max_tokens, min_tokens = random.randrange(1, 80), random.choice([0, 0, 6])
        stop_ids = random.choice([(), (), (7,), (3, 8, 40)])
        num_logprobs = random.choice([-1] * 5 + [2])
        answers = [
            driver.submit(
                new_submit(
                    number, prompt, max_tokens, stop_ids, min_tokens=min_tokens, num_logprobs=num_logprobs
                )
            )
            for driver in self.drivers
        ]  # fmt: skip
        self.answers.append((answers[0], answers[1]))

    def deliver(self) -> None:
        fast, slow = self.drivers
        requests = dict(fast.core.queues.open)
        outcome = fast.core.take_result(fast.worker.deliver())
        self.num_in_runs += sum(map(len, outcome.runs))
        self.num_alone += len(outcome.rows)
        items = list(outcome.spelled_out(requests))
        for item in items:  # what they wrote down is looked at now and then only: ids may wait in the log
            answer = fast.answers[item.request.request_id]
            answer.token_ids += item.token_ids
            answer.finish = item.finish
        assert told(items) == told(slow.deliver())

    def check(self) -> None:
        for fast, slow in self.answers:
            assert (fast.token_ids, fast.finish) == (slow.token_ids, slow.finish)
            assert cursors(fast) == cursors(slow)
        fast_core, slow_core = (driver.core for driver in self.drivers)
        assert fast_core.counters == slow_core.counters


@pytest.mark.parametrize(("page_size", "plans_ahead"), [(1, 0), (1, 1), (4, 1), (16, 0), (16, 3)])
def test_lockstep_and_row_by_row_are_one(page_size: int, plans_ahead: int) -> None:
    """No pages are missing here, so that both plan the same; who is retracted when some are is free."""
    random = Random(page_size + plans_ahead)
    pair = Pair(page_size, plans_ahead)
    for event in range(NUM_EVENTS):
        kind = random.random()
        is_open = [pair_of for pair_of in pair.answers if pair_of[0].finish is Finish.NONE]
        if kind < 0.08 and len(is_open) < 20:
            pair.submit(event + 1, random)
        elif kind < 0.10 and is_open:
            chosen = random.choice(is_open)
            for driver, answer in zip(pair.drivers, chosen, strict=True):
                driver.abort(answer)
        elif kind < 0.12 and is_open:
            chosen, end_index = random.choice(is_open), random.randrange(30)
            ends = [driver.stop_found(answer, end_index) for driver, answer in zip(pair.drivers, chosen, strict=True)]
            assert ends[0] == ends[1]
        elif kind < 0.125 and is_open:
            chosen = random.choice(is_open)
            for driver, answer in zip(pair.drivers, chosen, strict=True):
                driver.worker.nan_requests.add(answer.request.request_id)
        elif kind < 0.6 and pair.drivers[0].worker.results:
            pair.deliver()
        else:
            for driver in pair.drivers:
                driver.plan()
        if kind < 0.01 or event % 400 > 380:
            pair.check()
    pair.check()
    assert min(pair.num_in_runs, pair.num_alone) > 200


def test_a_batch_of_runs_and_rows_has_them_in_order() -> None:
    submits = [new_submit(number, [1, 2], 9, num_logprobs=-1) for number in (1, 2, 3)]
    requests = [Request(submit, 11, 0) for submit in submits]
    formation = Formation(b"").joined_by(requests[:2], step=0)
    run = TokenRun(
        b"", formation.request_ids, formation.attempts, pack_int32([4, 5]), pack_int32([7, 8]), formation.cached_tokens
    )
    batch = TokenBatch()
    batch.add(requests[2], 0, [1, 2, 3], Finish.NONE)
    batch.add_run(run)
    batch.add(requests[0], 5, [9], Finish.LENGTH)
    (message,) = batch.messages()
    message.check()
    assert rows_of(message) == [
        (submits[2].request_id, 0, [1, 2, 3], Finish.NONE),
        (submits[0].request_id, 4, [7], Finish.NONE),
        (submits[1].request_id, 5, [8], Finish.NONE),
        (submits[0].request_id, 5, [9], Finish.LENGTH),
    ]


def rows_of(message: TokensProduced) -> list[tuple[bytes, int, list[int], int]]:
    ids = split_by_counts(unpack_int32(message.token_ids), unpack_int32(message.counts))
    names = unpack_request_ids(message.request_ids)
    return list(zip(names, unpack_int32(message.first_indexes), ids, message.finishes, strict=True))
