"""Speculation against solo runs: whatever is proposed, every answer is the one without, and no page is lost."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.ngram_index import NgramIndex
from services.scheduler.proposer import Proposer, SpeculationLimits
from services.wire.columns import pack_int32, unpack_int32
from services.wire.finish import Finish
from tests.unit.scheduler.core_driver import Answer, Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit

PHRASE = [1, 2, 3, 4, 5, 1, 2, 3, 9, 4, 5]


@pytest.mark.parametrize("num_steps", [1200, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("page_size", "plans_ahead", "num_pages", "step_tokens"), [(1, 0, 200, 12), (4, 1, 50, 16), (16, 2, 256, 40)]
)
def test_random_steps_give_the_answers_of_solo_runs_and_lose_no_page(
    page_size: int, plans_ahead: int, num_pages: int, step_tokens: int, num_steps: int
) -> None:
    """Answers that repeat themselves beside answers that never do, in pools that are too small for them."""
    random = Random(page_size)
    limits = new_limits(
        num_pages, page_size, SpeculationLimits(6, 2, step_tokens), plans_ahead=plans_ahead, token_budget=40
    )
    driver = Driver(limits, is_reckless=True)
    open_answers: list[Answer] = []
    done: list[Answer] = []
    for step in range(num_steps):
        event = random.random()
        open_answers = [answer for answer in open_answers if answer.finish is Finish.NONE]
        if event < 0.06 and len(open_answers) < 12:
            prompt = PHRASE * random.randrange(3) + [random.randrange(6) for _ in range(random.randrange(1, 30))]
            stop_ids = tuple(random.sample(range(50), random.choice([0, 0, 1, 3])))
            submit = new_submit(
                step + 1, prompt, random.randrange(1, 120), stop_ids, seed=random.choice([7, -3, -9, -50]),
                has_rules=random.random() < 0.1, num_logprobs=random.choice([-1] * 9 + [1]),
            )  # fmt: skip
            open_answers.append(driver.submit(submit))
            done.append(open_answers[-1])
        elif event < 0.07 and open_answers:
            driver.abort(random.choice(open_answers))
        elif event < 0.08 and open_answers:
            driver.stop_found(random.choice(open_answers), random.randrange(0, 20))
        elif event < 0.085 and open_answers:
            driver.worker.nan_requests.add(random.choice(open_answers).request.request_id)
        elif event < 0.09:
            driver.core.flush_cache()
        elif driver.worker.results and event < 0.6:
            driver.deliver()
        else:
            driver.plan()
    driver.run()
    counters, worker = driver.core.counters, driver.worker
    assert worker.num_proposed >= counters.proposed_tokens > num_steps // 20
    assert worker.num_accepted >= counters.accepted_tokens > num_steps // 50
    assert worker.lockstep_beside > 50
    for answer in done:
        driver.check_answer(answer)
    assert len({answer.finish for answer in done}) >= 5
    driver.core.flush_cache()
    assert driver.core.ledger.pool.num_free == limits.num_pages


@given(
    ids=st.lists(st.integers(0, 3) | st.integers(0, 2**31 - 1), min_size=1, max_size=200),
    length=st.integers(1, 5),
    data=st.data(),
)
def test_the_index_finds_what_followed_the_last_time(ids: list[int], length: int, data: st.DataObject) -> None:
    """However many ids come at once, against a plain search backwards."""
    index, token_bytes = NgramIndex(length), bytearray()
    while len(token_bytes) < 4 * len(ids):
        start = len(token_bytes) // 4
        token_bytes += pack_int32(ids[start : start + data.draw(st.sampled_from([1, 2, 60]))])
        known = ids[: len(token_bytes) // 4]
        places = [at for at in range(length, len(known)) if known[at - length : at] == known[-length:]]
        found = index.find(token_bytes)
        assert found == (places[-1] if places else 0) or (found == 0 and len(set(known)) > 1)
        if len(known) < 100 and max(known) < 4:
            assert found == (places[-1] if places else 0)


@given(ids=st.lists(st.integers(0, 2), min_size=2, max_size=40), num_ids=st.integers(1, 16))
def test_a_proposal_is_what_followed_and_begins_again_behind_the_newest_id(ids: list[int], num_ids: int) -> None:
    proposer, token_bytes = Proposer(SpeculationLimits(16, 1, 32)), bytearray(pack_int32(ids))
    is_found = proposer.find(token_bytes)
    assert is_found == (ids[-1] in ids[:-1])
    if is_found:
        place = len(ids) - 1 - ids[:-1][::-1].index(ids[-1])
        expected = [*ids]
        for offset in range(num_ids):
            expected.append(expected[place + offset])
        assert unpack_int32(proposer.proposal(token_bytes, num_ids)) == expected[len(ids) :]


def test_many_ids_at_once_are_noted_like_one_by_one() -> None:
    """Longer than what is taken in at once; the place of a run is that of its last occurrence."""
    ids = np.random.default_rng(1).integers(0, 50_000, 70_000).astype("<i4")
    ids[-3:] = ids[69_000:69_003]
    assert NgramIndex(3).find(bytearray(ids.tobytes())) == 69_003
