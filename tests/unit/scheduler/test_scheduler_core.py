"""The core: limits, order of admission, siblings, resubmission, and what a worker may get wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler import step_plan
from services.scheduler.admission import CoreLimits, RequestRefusedError
from services.scheduler.core import Core
from services.scheduler.kv_ledger import LedgerError
from services.scheduler.queues import QueueError
from services.scheduler.request import TRANSITIONS, IllegalTransitionError, Request, RequestState
from services.wire.columns import pack_int32
from services.wire.finish import Finish
from tests.unit.scheduler.core_driver import Answer, Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit, solo_output

PROMPT = list(range(1, 12))


def rows_planned(driver: Driver) -> list[int]:
    """Request numbers in the order in which the core admitted them, from the worker's rows."""
    return [int.from_bytes(row.request_id, "big") for row in driver.worker.rows.values()]


def test_every_state_has_its_transitions_and_finished_none() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    assert not TRANSITIONS[RequestState.FINISHED]
    driver = Driver(new_limits(64, 4))
    request = driver.submit(new_submit(1, PROMPT, 3)).request
    with pytest.raises(IllegalTransitionError, match="waiting -> retracted"):
        request.move_to(RequestState.RETRACTED)
    driver.run()
    with pytest.raises(IllegalTransitionError, match="finished -> running"):
        request.move_to(RequestState.RUNNING)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 0}, "must not be empty"),
        ({"max_model_len": 1}, "hold no prompt and answer"),
        ({"plans_ahead": 5}, "0 to 4"),
        ({"token_budget": 7}, "cannot hold 8 running requests"),
        ({"chunk_tokens": 0}, "chunk of 0 tokens"),
        ({"chunk_tokens": -1}, r"64 \+ 8 tokens: --max-num-batched-tokens is 24"),
    ],
)
def test_limits_that_cannot_work_together_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoreLimits(**({name: getattr(new_limits(64, 1), name) for name in CoreLimits.__slots__} | changes))


@pytest.mark.parametrize(
    ("prompt", "outputs", "message"),
    [([], [], "no tokens"), ([50], [], r"outside \[0, 50\)"), ([1], [50], r"outside \[0, 50\)")],
)
def test_impossible_ids_are_refused(prompt: list[int], outputs: list[int], message: str) -> None:
    driver = Driver(new_limits(64, 4))
    with pytest.raises(RequestRefusedError, match=message) as refusal:
        driver.submit(new_submit(1, prompt, 5, output_token_ids=outputs))
    assert refusal.value.status == 400
    assert driver.core.is_idle


def test_a_full_queue_is_a_503_and_free_rows_count_as_room() -> None:
    driver = Driver(new_limits(64, 4, max_rows=2, max_waiting=1))
    for number in (1, 2, 3):  # two rows and a place in the queue
        driver.submit(new_submit(number, PROMPT, 5))
    with pytest.raises(RequestRefusedError, match="queue is full") as refusal:
        driver.submit(new_submit(9, PROMPT, 5))
    assert (refusal.value.status, refusal.value.code) == (503, "queue_full")
    driver.plan()
    with pytest.raises(RequestRefusedError, match="1 requests are waiting, the limit is 1"):
        driver.submit(new_submit(5, PROMPT, 5))
    driver.run()


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    driver = Driver(new_limits(400, 1))
    short = driver.submit(new_submit(1, PROMPT, 40))
    driver.plan()
    driver.deliver()
    long = driver.submit(new_submit(2, [2] * 100, 2))
    for _ in range(6):
        num_before = len(short.token_ids)
        driver.plan()
        driver.deliver()
        assert driver.worker.step_tokens[-1] == [1, 16]
        assert len(short.token_ids) == num_before + 1
    driver.run()
    for answer in (short, long):
        driver.check_answer(answer)


def test_chunks_shrink_behind_a_long_context_so_that_steps_take_as_long() -> None:
    driver = Driver(new_limits(4000, 1, token_budget=208, chunk_tokens=200, chunk_context=300))
    short = driver.submit(new_submit(1, PROMPT, 120))
    driver.plan()
    driver.deliver()
    long = driver.submit(new_submit(2, [2] * 2000, 2))
    chunks: list[int] = []
    while sum(chunks) < 2000:
        driver.plan()
        driver.deliver()
        decode, chunk = driver.worker.step_tokens[-1]
        assert decode == 1
        chunks.append(chunk)
    assert chunks[0] == 200
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    starts = [sum(chunks[:number]) for number in range(len(chunks))]
    costs = [chunk * (1 + start / 300) for chunk, start in zip(chunks, starts, strict=True)]
    assert max(costs) <= 200
    assert min(costs[:-1]) > 180
    driver.run()
    for answer in (short, long):
        driver.check_answer(answer)


def test_a_chunk_has_sixteen_tokens_behind_any_context_and_leaves_nothing_to_others() -> None:
    limits = new_limits(400, 1, token_budget=108, chunk_tokens=100, chunk_context=10)
    assert limits.most_behind(10**6, 100) == 16
    assert limits.budget_after(100, 10**6, 16) == 0
    assert limits.most_behind(10**6, 7) == 7
    assert limits.most_behind(0, 100) == 100
    assert limits.budget_after(100, 30, 5) == 80
    assert limits.budget_after(100, 30, 24) == 4
    plain = new_limits(400, 1)
    assert (plain.most_behind(10**6, 16), plain.budget_after(16, 10**6, 5)) == (16, 11)


def test_the_token_budget_holds_decodes_and_prefill_together() -> None:
    driver = Driver(new_limits(400, 1, max_rows=4, token_budget=6, chunk_tokens=16))
    answers = [driver.submit(new_submit(number, [*PROMPT, number], 10)) for number in range(1, 5)]
    driver.run()
    assert max(map(sum, driver.worker.step_tokens)) == 6
    for answer in answers:
        driver.check_answer(answer)


def admission_order(driver: Driver, answers: list[Answer]) -> list[int]:
    """Runs with one row and returns the numbers of requests in the order in which they ran."""
    order: list[int] = []
    while any(answer.finish is Finish.NONE for answer in answers):
        driver.plan()
        for number in rows_planned(driver):
            if number not in order:
                order.append(number)
        driver.deliver()
    return order


def test_the_tenant_that_was_served_least_comes_first() -> None:
    driver = Driver(new_limits(400, 1, max_rows=1))
    answers = [driver.submit(new_submit(number, [number] * 20, 5, tenant="a")) for number in (1, 2, 3)]
    answers += [driver.submit(new_submit(number, [number] * 20, 5, tenant="b")) for number in (4, 5)]
    assert admission_order(driver, answers) == [1, 4, 2, 5, 3]


def test_priority_is_lower_first_and_below_the_tenant_share() -> None:
    driver = Driver(new_limits(400, 1, max_rows=1))
    answers = [
        driver.submit(new_submit(1, [1] * 9, 2, tenant="a", priority=5)),
        driver.submit(new_submit(2, [2] * 9, 2, tenant="a", priority=0)),
        driver.submit(new_submit(3, [3] * 9, 2, tenant="a", priority=-1)),
    ]
    assert admission_order(driver, answers) == [3, 2, 1]


def test_the_longest_cached_prefix_goes_first_and_equals_go_by_arrival() -> None:
    driver = Driver(new_limits(400, 1, max_rows=1))
    driver.submit(new_submit(1, [7] * 40, 1))
    driver.run()
    answers = [
        driver.submit(new_submit(2, [1] * 9, 2)),
        driver.submit(new_submit(3, [7] * 10 + [1], 2)),
        driver.submit(new_submit(4, [7] * 30 + [1], 2)),
        driver.submit(new_submit(5, [2] * 9, 2)),
    ]
    assert admission_order(driver, answers) == [4, 3, 2, 5]


@pytest.mark.parametrize("chunk_tokens", [16, 100])
def test_nothing_is_admitted_that_would_soon_need_a_retraction(chunk_tokens: int) -> None:
    """Two answers of 32 more tokens fit into 90 pages, three do not: the third waits and nobody is retracted."""
    driver = Driver(new_limits(90, 1, plans_ahead=1, token_budget=200, chunk_tokens=chunk_tokens))
    answers = [driver.submit(new_submit(number, [number] * 10, 33)) for number in (1, 2, 3)]
    driver.plan()
    assert (driver.core.num_running, driver.core.num_waiting) == (2, 1)
    driver.run()
    assert driver.core.counters.retracted == 0
    for answer in answers:
        driver.check_answer(answer)


def test_retractions_raise_the_expected_share_and_steps_lower_it() -> None:
    driver = Driver(new_limits(40, 1), is_reckless=True)
    first = driver.core.reservations.estimate.share
    for number in (1, 2):
        driver.submit(new_submit(number, [number] * 8, 25))
    while not driver.core.num_retracted:
        driver.plan()
        driver.deliver()
    raised = driver.core.reservations.estimate.share
    assert raised > first
    driver.run()
    assert driver.core.reservations.estimate.share < raised


def test_retracted_requests_resume_before_new_ones() -> None:
    driver = Driver(new_limits(40, 1), is_reckless=True)
    answers = [driver.submit(new_submit(number, [number] * 8, 25)) for number in (1, 2)]
    while not driver.core.num_retracted:
        driver.plan()
        driver.deliver()
    late = driver.submit(new_submit(3, [3, 3], 2))
    while driver.core.num_retracted:
        assert late.request.state is RequestState.WAITING
        driver.plan()
        driver.deliver()
    driver.run()
    for answer in (*answers, late):
        driver.check_answer(answer)


@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_siblings_wait_for_the_first_ones_prompt_and_then_share_it(plans_ahead: int) -> None:
    driver = Driver(new_limits(400, 4, plans_ahead=plans_ahead))
    prompt = list(range(30))
    answers = [driver.submit(new_submit(1 + choice, prompt, 6, group_id=1, choice=choice)) for choice in range(4)]
    driver.plan()
    assert [answer.request.state for answer in answers[1:]] == [RequestState.HELD] * 3
    driver.run()
    assert [answer.request.cached_tokens for answer in answers] == [0, 28, 28, 28]
    assert len({tuple(answer.token_ids) for answer in answers}) == 4
    for answer in answers:
        driver.check_answer(answer)


def test_when_the_first_sibling_goes_the_next_one_leads() -> None:
    driver = Driver(new_limits(400, 4))
    prompt = list(range(30))
    answers = [driver.submit(new_submit(1 + choice, prompt, 6, group_id=1, choice=choice)) for choice in range(3)]
    driver.plan()
    driver.deliver()
    driver.abort(answers[0])
    assert [answer.request.state for answer in answers[1:]] == [RequestState.WAITING, RequestState.HELD]
    driver.run()
    assert [answer.request.cached_tokens for answer in answers[1:]] == [16, 28]  # 16: what the first had computed
    for answer in answers:
        driver.check_answer(answer)


def test_siblings_follow_at_once_when_the_first_one_ends_with_its_prompt() -> None:
    driver = Driver(new_limits(400, 4, token_budget=200, chunk_tokens=190))
    prompt = list(range(30))
    answers = [driver.submit(new_submit(1 + choice, prompt, 1, group_id=1, choice=choice)) for choice in range(4)]
    assert driver.run() == 2
    assert [answer.request.cached_tokens for answer in answers] == [0, 28, 28, 28]


def test_siblings_of_a_prompt_below_a_page_do_not_wait() -> None:
    driver = Driver(new_limits(64, 16))
    answers = [driver.submit(new_submit(1 + choice, PROMPT, 3, group_id=1, choice=choice)) for choice in range(3)]
    driver.plan()
    assert driver.core.num_running == 2  # as many as a chunk of 16 tokens begins
    driver.run()
    for answer in answers:
        driver.check_answer(answer)


def test_below_min_tokens_no_id_ends_an_answer() -> None:
    free_run, _ = solo_output(new_submit(1, PROMPT, 30), 8192)
    for min_tokens in (0, 4, 12, 30):
        driver = Driver(new_limits(64, 4))
        answer = driver.submit(new_submit(1, PROMPT, 30, tuple(range(50)), min_tokens=min_tokens))
        driver.run()
        assert answer.token_ids == free_run[: min(min_tokens + 1, 30)]


def test_a_final_id_ends_an_answer_below_min_tokens_too() -> None:
    """With a grammar, end ids come there only where it leaves nothing else: to go on would pad the answer with them."""
    free_run, _ = solo_output(new_submit(1, PROMPT, 30), 8192)
    driver = Driver(new_limits(64, 4))
    submit = new_submit(1, PROMPT, 30, tuple(range(50)), min_tokens=20)
    answer = driver.submit(replace(submit, final_token_ids=pack_int32([free_run[3]])))
    driver.run()
    assert answer.token_ids == free_run[: free_run.index(free_run[3]) + 1]
    assert answer.finish is Finish.STOP_TOKEN
    again = Request(replace(submit, final_token_ids=submit.stop_token_ids, output_token_ids=pack_int32([7])), 99, 1)
    assert again.first_verdict() is Finish.STOP_TOKEN


def test_a_resubmitted_answer_goes_on_where_it_was() -> None:
    whole, _ = solo_output(new_submit(1, PROMPT, 20), 8192)
    for num_before in (1, 7, 19, 20):
        driver = Driver(new_limits(64, 4))
        answer = driver.submit(new_submit(1, PROMPT, 20, output_token_ids=whole[:num_before], attempt=1))
        driver.run()
        assert (answer.token_ids, answer.finish) == (whole, Finish.LENGTH)
        assert answer.request.cached_tokens <= len(PROMPT) - 1


def test_a_resubmitted_answer_that_had_ended_ends_at_once() -> None:
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 20, (9,), output_token_ids=[3, 9]))
    assert (answer.request.state, answer.finish) == (RequestState.FINISHED, Finish.STOP_TOKEN)
    assert driver.core.is_idle


def test_without_prefix_caching_the_tree_stays_empty() -> None:
    limits = replace(new_limits(64, 1), caches_prefixes=False)
    driver = Driver(limits)
    answers = [driver.submit(new_submit(1 + choice, PROMPT, 5, group_id=1, choice=choice)) for choice in range(3)]
    driver.run()
    again = driver.submit(new_submit(9, PROMPT, 5))
    driver.run()
    assert again.request.cached_tokens == 0
    assert driver.core.ledger.pool.num_free == 64
    for answer in (*answers, again):
        driver.check_answer(answer)


def test_salted_prompts_share_nothing() -> None:
    driver = Driver(new_limits(64, 1))
    for number, salt in enumerate([b"", b"a", b"b", b"a"], 1):
        answer = driver.submit(new_submit(number, PROMPT, 2, cache_root=salt))
        driver.run()
        assert answer.request.cached_tokens == (10 if number == 4 else 0)


def test_a_plan_stops_admitting_when_its_new_rows_grow_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached prompts cost no budget, but their ids travel: a frame has a limit."""
    driver = Driver(new_limits(400, 1))
    driver.submit(new_submit(1, [7] * 40, 1))
    driver.run()
    monkeypatch.setattr(step_plan, "MAX_NEW_ROW_IDS", 100)
    answers = [driver.submit(new_submit(number, [7] * 40 + [1], 3)) for number in range(2, 6)]
    driver.plan()
    assert driver.core.num_running == 2  # each brings 41 token ids and 41 page ids
    driver.run()
    for answer in answers:
        driver.check_answer(answer)


def test_a_request_ends_in_every_state_with_any_reason() -> None:
    driver = Driver(new_limits(40, 1, max_rows=2), is_reckless=True)
    answers = [driver.submit(new_submit(number, [number] * 8, 25)) for number in (1, 2, 3)]
    held = driver.submit(new_submit(4, [3] * 8, 25, group_id=3, choice=1))
    while not driver.core.num_retracted:
        driver.plan()
        driver.deliver()
    states = {answer.request.state for answer in (*answers, held)}
    assert states == {RequestState.RUNNING, RequestState.RETRACTED, RequestState.WAITING, RequestState.HELD}
    for answer in (*answers, held):
        item = driver.core.end(answer.request, Finish.TIMEOUT)
        driver.record(item)
        driver.core.check_invariants()
        assert driver.core.end(answer.request, Finish.ABORTED) is None
        assert answer.finish is Finish.TIMEOUT
    driver.run()


def test_an_empty_core_neither_plans_nor_has_anything_to_do() -> None:
    core = Core(new_limits(4, 4), 1)
    assert core.is_idle
    assert not core.can_plan()
    core.check_invariants()


def test_after_an_empty_plan_the_core_waits_for_an_event() -> None:
    driver = Driver(new_limits(40, 1, plans_ahead=4))
    driver.submit(new_submit(1, PROMPT, 2))
    driver.plan()
    assert driver.core.num_in_flight == 2  # the prompt and one decode: nothing is left to plan
    assert not driver.core.can_plan()
    driver.run()


def test_broken_books_are_noticed() -> None:
    driver = Driver(new_limits(16, 1))
    answer = driver.submit(new_submit(1, [1, 2, 3], 5))
    driver.plan()
    page = answer.request.pages.pop()
    with pytest.raises(LedgerError, match="15 pages"):
        driver.core.check_invariants()
    answer.request.pages.append(page)
    answer.request.num_tree_pages = 1
    with pytest.raises(LedgerError, match="lends 0 pages"):
        driver.core.check_invariants()
    answer.request.num_tree_pages = 0
    answer.request.state = RequestState.WAITING
    with pytest.raises(QueueError, match=r"waiting request stands in \['running'\]"):
        driver.core.check_invariants()
