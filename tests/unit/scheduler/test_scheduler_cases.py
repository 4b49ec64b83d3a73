"""Cases that broke other servers, on the core and its parts."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from services.scheduler.admission import RequestRefusedError
from services.scheduler.kv_ledger import KvLedger
from services.scheduler.policy import AGE_LIMIT_PASSES
from services.scheduler.radix_cache import RadixCache
from services.wire.finish import Finish
from tests.unit.scheduler.core_driver import Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit, solo_output

PROMPT = list(range(1, 12))  # 11 ids, as F-NUM has


def key_of(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


@pytest.mark.parametrize(("page_size", "usable"), [(1, 7), (4, 4)])
def test_sch_01_a_whole_prompt_in_the_cache_leaves_one_token_to_compute(page_size: int, usable: int) -> None:
    cache = RadixCache(page_size)
    cache.insert(b"", key_of(list(range(8))), list(range(8 // page_size)))
    assert cache.usable_tokens(8) == usable
    match = cache.match(b"", key_of(list(range(8))[: cache.usable_tokens(8)]))
    assert len(match.pages) * page_size == usable
    assert cache.usable_tokens(1) == cache.usable_tokens(0) == 0


def test_sch_01_the_same_prompt_twice_extends_by_at_least_one_token() -> None:
    for prompt in (PROMPT, [7]):
        driver = Driver(new_limits(64, 1))
        answers = []
        for number in (1, 2):
            answers.append(driver.submit(new_submit(number, prompt, 3)))
            driver.run()
        assert all(min(counts) >= 1 for counts in driver.worker.step_tokens)
        assert answers[0].token_ids == answers[1].token_ids
        assert [answer.request.cached_tokens for answer in answers] == [0, len(prompt) - 1]


def test_sch_02_a_hit_gives_what_a_miss_gave_and_outputs_are_reusable() -> None:
    driver = Driver(new_limits(128, 1))
    first = driver.submit(new_submit(1, PROMPT, 20))
    driver.run()
    second = driver.submit(new_submit(2, PROMPT, 20))
    driver.run()
    third = driver.submit(new_submit(3, PROMPT + first.token_ids[:5], 15))
    driver.run()
    assert second.token_ids == first.token_ids
    assert third.token_ids == first.token_ids[5:]
    assert [answer.request.cached_tokens for answer in (first, second, third)] == [0, 10, 15]


def test_sch_03_a_lock_covers_the_matched_node_itself() -> None:
    cache = RadixCache(1)
    shared, other = list(range(1, 9)), [1, 2, 3, 4, 9, 9, 9, 9]
    cache.insert(b"", key_of(shared), list(range(8)))
    assert cache.insert(b"", key_of(other), list(range(10, 18))).rejected == [10, 11, 12, 13]
    match = cache.match(b"", key_of(shared))
    cache.lock(match.node)
    assert sorted(cache.evict(100)) == [14, 15, 16, 17]
    assert cache.match(b"", key_of(shared)).pages == list(range(8))
    assert (cache.num_locked_pages, cache.num_evictable_pages) == (8, 0)
    cache.unlock(match.node)
    assert (cache.num_locked_pages, cache.num_evictable_pages) == (0, 8)


def test_sch_04_requests_that_compute_the_same_prefix_keep_their_own_pages() -> None:
    driver = Driver(new_limits(40, 1, chunk_tokens=24))
    prompt = list(range(8))
    answers = [driver.submit(new_submit(number, prompt, 6)) for number in (1, 2)]
    driver.plan()
    tables = [list(answer.request.pages) for answer in answers]
    assert not set(tables[0]) & set(tables[1])
    driver.deliver()  # both prompts are computed: the first goes to the tree, the second stays its own
    assert [answer.request.num_tree_pages for answer in answers] == [8, 0]
    third = driver.submit(new_submit(3, [9] * 8, 1))
    driver.plan()
    assert not set(third.request.pages) & (set(tables[0]) | set(tables[1]))
    assert [answer.request.pages[:8] for answer in answers] == tables
    driver.run()
    assert answers[0].token_ids == answers[1].token_ids


def test_sch_04_eight_identical_prompts_at_once_equal_the_solo_run() -> None:
    driver = Driver(new_limits(60, 4, token_budget=200, chunk_tokens=190))
    answers = [driver.submit(new_submit(number, PROMPT, 12)) for number in range(1, 9)]
    driver.run()
    for answer in answers:
        driver.check_answer(answer)


def test_sch_07_what_can_never_fit_is_refused_with_the_numbers() -> None:
    driver = Driver(new_limits(64, 1))
    with pytest.raises(RequestRefusedError, match=r"100 tokens; the KV pool holds 64") as refusal:
        driver.submit(new_submit(1, [1] * 100, 5))
    assert (refusal.value.status, refusal.value.code, refusal.value.param) == (400, "kv_pool_exceeded", "prompt")
    answer = driver.submit(new_submit(2, PROMPT, 5))
    driver.run()
    driver.check_answer(answer)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_sch_07_the_largest_prompt_that_fits_runs(page_size: int) -> None:
    driver = Driver(new_limits(64 // page_size, page_size))
    answer = driver.submit(new_submit(1, [1] * 63, 5))
    driver.run()
    assert (len(answer.token_ids), answer.finish) == (1, Finish.LENGTH)
    with pytest.raises(RequestRefusedError):
        driver.submit(new_submit(2, [1] * 64, 5))


def test_sch_07_a_prompt_of_the_whole_context_is_refused() -> None:
    driver = Driver(new_limits(64, 16, max_model_len=30))
    with pytest.raises(RequestRefusedError, match="the context of 30") as refusal:
        driver.submit(new_submit(1, [1] * 30, 5))
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("plans_ahead", range(5))
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_sch_09_retraction_neither_loses_nor_repeats_a_token(page_size: int, plans_ahead: int) -> None:
    driver = Driver(new_limits(64 // page_size, page_size, plans_ahead=plans_ahead), is_reckless=True)
    answers = [
        driver.submit(new_submit(1, PROMPT, 40)),
        driver.submit(new_submit(2, [20 + i for i in range(9)], 40)),
    ]
    driver.run()
    assert driver.core.counters.retracted >= 1
    for answer in answers:
        driver.check_answer(answer)
        assert (len(answer.token_ids), answer.finish) == (40, Finish.LENGTH)


@pytest.mark.parametrize("plans_ahead", [0, 1])
@pytest.mark.parametrize("is_reckless", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_r8_a_pool_for_two_of_fifty_finishes_all_fifty(page_size: int, is_reckless: bool, plans_ahead: int) -> None:
    """No livelock: even if admission expects nothing, what is computed again stays within half of all work."""
    limits = new_limits(160 // page_size, page_size, max_rows=50, token_budget=60, plans_ahead=plans_ahead)
    driver = Driver(limits, is_reckless)
    answers = [driver.submit(new_submit(number, [number % 50] * 30, 50)) for number in range(1, 51)]
    driver.run()
    for answer in answers:
        driver.check_answer(answer)
    assert driver.core.counters.computed_tokens <= 1.5 * 50 * (30 + 49)


def test_sch_11_a_cold_request_is_admitted_within_32_passes() -> None:
    driver = Driver(new_limits(600, 1, max_rows=1, token_budget=300, chunk_tokens=200))
    hot_prefix = [5] * 100
    driver.submit(new_submit(1, hot_prefix, 1))
    driver.run()
    cold = driver.submit(new_submit(2, [6] * 101, 1))
    passes = 0
    while cold.finish is Finish.NONE:
        driver.submit(new_submit(10 + passes, [*hot_prefix, passes % 50], 1))
        driver.plan()
        driver.deliver()
        passes += 1
        assert passes <= 32
    assert passes > AGE_LIMIT_PASSES  # before that the hot ones did go first


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_sch_13_prefill_takes_as_many_steps_as_chunks(length: int) -> None:
    answers = []
    for chunk_tokens in (16, -1):
        driver = Driver(new_limits(64, 1, chunk_tokens=chunk_tokens, token_budget=100))
        answers.append(driver.submit(new_submit(1, list(range(length)), 1)))
        num_steps = driver.run()
        assert num_steps == (1 if chunk_tokens == -1 else -(-length // 16))
    assert answers[0].token_ids == answers[1].token_ids


def test_sch_13_a_cached_prefix_leaves_one_chunk() -> None:
    driver = Driver(new_limits(128, 1))
    prompt = [3] * 25 + list(range(25))
    driver.submit(new_submit(1, prompt[:40], 1))
    driver.run()
    answer = driver.submit(new_submit(2, prompt, 1))
    assert driver.run() == 1
    assert answer.request.cached_tokens == 40
    assert driver.worker.step_tokens[-1] == [10]
    driver.check_answer(answer)


def test_sch_16_short_keys_and_unaligned_tails() -> None:
    cache = RadixCache(4)
    assert cache.match(b"", key_of([1, 2, 3])).pages == []
    insertion = cache.insert(b"", key_of(list(range(10))), [0, 1, 2])
    assert insertion.rejected == [2]
    assert (cache.num_pages, cache.num_evictable_pages) == (2, 2)
    assert cache.match(b"", key_of(list(range(10)))).pages == [0, 1]
    with pytest.raises(ValueError, match="1 pages for 10 tokens"):
        cache.insert(b"", key_of(list(range(10))), [7])


def test_sch_16_the_tail_page_of_a_finished_request_is_freed_once() -> None:
    driver = Driver(new_limits(8, 4))
    driver.submit(new_submit(1, list(range(10)), 1))
    driver.run()
    assert driver.core.ledger.cache.num_pages == 2
    assert driver.core.ledger.pool.num_free == 6
    again = driver.submit(new_submit(2, list(range(10)), 1))
    driver.run()
    assert again.request.cached_tokens == 8


def test_sch_18_no_space_is_said_at_once_when_everything_is_locked() -> None:
    ledger = KvLedger(10, 1)
    pages = ledger.pool.allocate(10)
    assert pages is not None
    node = ledger.cache.insert(b"", key_of(list(range(10))), pages).node
    ledger.cache.lock(node)
    assert ledger.cache.evict(10) == []
    driver = Driver(new_limits(8, 1))
    answer = driver.submit(new_submit(1, [1, 2], 1))
    driver.plan()
    assert driver.core.ledger.extend(answer.request, 7) is None
    driver.run()


def test_sch_18_an_inner_node_with_children_is_never_evicted() -> None:
    cache = RadixCache(1)
    cache.insert(b"", key_of([1, 2, 3]), [0, 1, 2])
    leaf = cache.insert(b"", key_of([1, 2, 4]), [10, 11, 3]).node
    cache.lock(leaf)
    assert cache.evict(100) == [2]
    assert cache.match(b"", key_of([1, 2, 4])).pages == [0, 1, 3]


@pytest.mark.parametrize(
    ("max_tokens", "num_tokens"), [(0, 0), (1, 1), (19, 19), (20, 19), (30, 19), (10**6, 19), (2**31 - 1, 19)]
)
@pytest.mark.parametrize("plans_ahead", [0, 4])
def test_sch_19_max_tokens_is_kept_and_never_overruns_the_context(
    max_tokens: int, num_tokens: int, plans_ahead: int
) -> None:
    driver = Driver(new_limits(64, 1, max_model_len=30, plans_ahead=plans_ahead))
    answer = driver.submit(new_submit(1, PROMPT, max_tokens))
    driver.run()
    assert (len(answer.token_ids), answer.finish) == (num_tokens, Finish.LENGTH)
    num_computed = sum(map(sum, driver.worker.step_tokens))
    assert num_computed == len(PROMPT) + max(num_tokens - 1, 0)  # the last token's KV never is


@pytest.mark.parametrize("plans_ahead", range(5))
def test_sch_20_plans_ahead_give_no_token_more(plans_ahead: int) -> None:
    """stop_token_ids, max_tokens and a stop string, two of them ending in the same step."""
    free_run, _ = solo_output(new_submit(1, PROMPT, 30), 8192)
    stop_id = free_run[7]
    num_before_stop = free_run.index(stop_id) + 1
    driver = Driver(new_limits(64, 4, plans_ahead=plans_ahead))
    by_id = driver.submit(new_submit(1, PROMPT, 30, (stop_id,)))
    by_length = driver.submit(new_submit(2, PROMPT, num_before_stop))
    by_string = driver.submit(new_submit(3, PROMPT, 30))
    while by_string.finish is Finish.NONE:
        driver.plan()
        driver.deliver()
        if len(by_string.token_ids) >= 11:
            assert driver.stop_found(by_string, 11)
    driver.run()
    assert (by_id.token_ids, by_id.finish) == (free_run[:num_before_stop], Finish.STOP_TOKEN)
    assert (by_length.token_ids, by_length.finish) == (free_run[:num_before_stop], Finish.LENGTH)
    assert (by_string.token_ids, by_string.finish) == (free_run[:11], Finish.STOP_STRING)
    assert (driver.core.counters.dropped_rows > 0) == (plans_ahead > 0)


def test_sch_20_a_late_stop_string_after_the_end_changes_nothing_in_the_core() -> None:
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 5))
    driver.run()
    assert not driver.core.stop_found(answer.request, 3)
    assert answer.finish is Finish.LENGTH


def test_sch_21_an_open_id_cannot_be_submitted_twice() -> None:
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 5))
    with pytest.raises(ValueError, match="is open already"):
        driver.core.submit(new_submit(1, [3, 4], 5))
    driver.run()
    driver.check_answer(answer)
    again = driver.submit(new_submit(1, PROMPT, 0))  # an id whose request ended is free again
    driver.run()
    driver.check_answer(again)


@pytest.mark.parametrize("plans_ahead", [0, 2])
def test_smp_02_a_row_that_is_not_a_number_fails_alone_and_is_not_cached(plans_ahead: int) -> None:
    driver = Driver(new_limits(64, 1, plans_ahead=plans_ahead))
    answers = [driver.submit(new_submit(number, [number] * 9, 10)) for number in (1, 2, 3)]
    driver.worker.nan_requests.add(answers[1].request.request_id)
    driver.run()
    assert [answer.finish for answer in answers] == [Finish.LENGTH, Finish.NUMERICAL_ERROR, Finish.LENGTH]
    assert answers[1].token_ids == []
    for answer in (answers[0], answers[2]):
        driver.check_answer(answer)
    assert driver.core.ledger.cache.peek(b"", key_of([2] * 9)) == 0
    assert driver.core.ledger.cache.peek(b"", key_of([1] * 9)) == 9


def test_sse_03_a_request_aborted_in_the_queue_is_never_computed() -> None:
    driver = Driver(new_limits(200, 1, max_rows=1))
    first = driver.submit(new_submit(1, PROMPT, 30))
    driver.plan()
    queued = driver.submit(new_submit(2, [2] * 9, 30))
    last = driver.submit(new_submit(3, [3] * 9, 2))
    driver.abort(queued)
    driver.run()
    assert driver.core.counters.prompt_tokens == 11 + 9
    assert queued.token_ids == []
    for answer in (first, last):
        driver.check_answer(answer)


@pytest.mark.parametrize("length", [11, 31])
def test_met_03_cached_tokens_stay_below_the_prompt(length: int) -> None:
    driver = Driver(new_limits(128, 1))
    answers = []
    for number in (1, 2):
        answers.append(driver.submit(new_submit(number, list(range(length)), 4)))
        driver.run()
    assert [answer.request.cached_tokens for answer in answers] == [0, length - 1]
    assert all(answer.request.num_prompt == length for answer in answers)


def test_stp_13_the_stop_id_counts_as_a_token() -> None:
    free_run, _ = solo_output(new_submit(1, PROMPT, 30), 8192)
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 30, (free_run[7],)))
    driver.run()
    assert answer.token_ids[-1] == free_run[7]
    assert answer.finish is Finish.STOP_TOKEN


def test_stp_11_every_end_id_ends() -> None:
    free_run, _ = solo_output(new_submit(1, PROMPT, 30), 8192)
    for stop_id in set(free_run[:6]):
        driver = Driver(new_limits(64, 4))
        answer = driver.submit(new_submit(1, PROMPT, 30, (*range(100, 110), stop_id)))
        driver.run()
        assert answer.token_ids == free_run[: free_run.index(stop_id) + 1]


def test_det_06_an_id_that_no_vocabulary_has_fails_its_request_alone() -> None:
    driver = Driver(new_limits(64, 4, logits_width=50))
    bad = driver.submit(new_submit(1, PROMPT, 5))
    good = driver.submit(new_submit(2, [2] * 9, 5))
    driver.plan()
    result = driver.worker.deliver()
    ids = array("i", result.token_ids)
    ids[0] = 50
    for item in driver.core.apply_result(replace(result, token_ids=ids.tobytes())):
        driver.record(item)
    assert bad.finish is Finish.INTERNAL_ERROR
    driver.run()
    driver.check_answer(good)
