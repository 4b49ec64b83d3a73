"""What is wanted of a prompt itself: log-probabilities, embeddings, or that it is computed and nothing produced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler import step_plan
from services.scheduler.admission import RequestRefusedError
from services.scheduler.prompt_record import PromptPart
from services.wire.columns import pack_float32, pack_int32
from services.wire.finish import Finish
from services.wire.request_params import PromptParams, Task
from services.wire.requests import Resend
from services.wire.steps import Embedding, PromptLogprobs
from tests.unit.scheduler.core_driver import Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit, solo_output
from tests.unit.scheduler.scheduler_group import id_of, run_all, running_pipeline, worker_card

PROMPT = list(range(1, 12))
LOGPROBS = PromptParams(num_logprobs=1)
MEAN, LAST = PromptParams(task=Task.EMBED_MEAN), PromptParams(task=Task.EMBED_LAST)


def num_positions(driver: Driver, number: int) -> int:
    """Of how many prompt tokens a request was told."""
    parts = driver.prompt_parts[id_of(number)]
    return sum(len(part.counts) // 4 for part in parts if isinstance(part, PromptLogprobs))


@pytest.mark.parametrize("plans_ahead", [0, 1, 4])
def test_sch_19_without_tokens_to_produce_the_prompt_is_computed_and_the_end_is_its_length(plans_ahead: int) -> None:
    driver = Driver(new_limits(64, 4, plans_ahead=plans_ahead, chunk_tokens=4))
    answer = driver.submit(new_submit(1, PROMPT, 0))
    driver.run()
    assert (answer.token_ids, answer.finish) == ([], Finish.LENGTH)
    assert driver.worker.step_tokens == [[4], [4], [3]]
    again = driver.submit(new_submit(2, PROMPT, 3))
    driver.run()
    assert again.request.cached_tokens == 8  # it warmed the cache
    driver.check_answer(again)


@pytest.mark.parametrize("wish", [PromptParams(), LOGPROBS, LAST, MEAN])
def test_a_prompt_alone_may_fill_the_whole_context_or_pool(wish: PromptParams) -> None:
    for sizes in ({"max_model_len": 20}, {"num_pages": 20}):
        limits = new_limits(sizes.get("num_pages", 64), 1, max_model_len=sizes.get("max_model_len", 8192))
        driver = Driver(limits)
        answer = driver.submit(new_submit(1, [1] * 20, 0, prompt=wish))
        driver.run()
        driver.check_answer(answer)
        with pytest.raises(RequestRefusedError, match="21 tokens"):
            driver.submit(new_submit(2, [1] * 21, 0, prompt=wish))
        with pytest.raises(RequestRefusedError, match="20 tokens"):
            driver.submit(new_submit(3, [1] * 20, 1))


@pytest.mark.parametrize("plans_ahead", [0, 2])
def test_sch_12_prompt_log_probabilities_are_whole_whatever_the_cache_holds(plans_ahead: int) -> None:
    """The same prompt three times, another in between; chunks of 4 tokens."""
    driver = Driver(new_limits(64, 1, plans_ahead=plans_ahead, chunk_tokens=4))
    for number, prompt in enumerate([PROMPT, PROMPT, [*PROMPT[:5], 40], PROMPT], 1):
        answer = driver.submit(new_submit(number, prompt, 1, prompt=LOGPROBS))
        driver.run()
        driver.check_answer(answer)
        assert answer.request.cached_tokens == 0
        assert num_positions(driver, number) == len(prompt) - 1


def test_the_cache_is_used_up_to_the_first_position_wanted() -> None:
    """Position p needs token p - 1 computed; the cache lends whole pages below."""
    driver = Driver(new_limits(64, 2))
    driver.submit(new_submit(1, PROMPT, 1))
    driver.run()
    for number, (first, cached) in enumerate([(1, 0), (2, 0), (3, 2), (8, 6), (9, 8), (10, 8), (11, 10), (99, 10)], 2):
        wish = PromptParams(num_logprobs=0, logprobs_from=first)
        answer = driver.submit(new_submit(number, PROMPT, 2, prompt=wish))
        driver.run()
        driver.check_answer(answer)
        assert answer.request.cached_tokens == cached


def test_after_a_retraction_only_what_is_still_wanted_is_asked_for() -> None:
    driver = Driver(new_limits(40, 1, chunk_tokens=2), is_reckless=True)
    driver.submit(new_submit(1, [1] * 20, 19))
    late = driver.submit(new_submit(2, list(range(3, 19)), 3, prompt=LOGPROBS))
    first_positions = []
    while not late.finish:
        driver.plan()
        for row in driver.worker.rows.values():
            if row.request_id == id_of(2) and row.prompt.logprobs_from not in first_positions:
                first_positions.append(row.prompt.logprobs_from)
        driver.deliver()
    assert driver.core.counters.retracted
    assert first_positions[0] == 1 < first_positions[-1]
    driver.run()
    driver.check_answer(late)


def test_a_retracted_answer_whose_prompt_is_told_asks_for_nothing_more() -> None:
    driver = Driver(new_limits(40, 1), is_reckless=True)
    answers = [driver.submit(new_submit(n, [n] * 8, 25, prompt=LOGPROBS)) for n in (1, 2)]
    driver.run()
    assert driver.core.counters.retracted
    for number, answer in enumerate(answers, 1):
        driver.check_answer(answer)
        assert num_positions(driver, number) == 7


def test_a_mean_is_pooled_from_the_first_token_and_the_last_state_through_the_cache() -> None:
    driver = Driver(new_limits(64, 1, chunk_tokens=4))
    mean = driver.submit(new_submit(1, PROMPT, 0, prompt=MEAN))
    driver.run()
    last = driver.submit(new_submit(2, PROMPT, 0, prompt=LAST))
    driver.run()
    again = driver.submit(new_submit(3, PROMPT, 5, prompt=MEAN))
    driver.run()
    assert [each.request.cached_tokens for each in (mean, last, again)] == [0, 10, 0]  # a mean gives its pages
    for answer in (mean, last, again):
        driver.check_answer(answer)
        assert (answer.token_ids, answer.finish) == ([], Finish.LENGTH)
    with pytest.raises(RequestRefusedError, match="pooled"):
        driver.submit(new_submit(4, PROMPT, 0, prompt=LAST, output_token_ids=[3]))


def test_siblings_compute_a_prompt_once_and_each_is_told_in_its_own_name() -> None:
    driver = Driver(new_limits(400, 4, plans_ahead=1))
    prompt = list(range(30))
    answers = [
        driver.submit(new_submit(1 + choice, prompt, 6, group_id=1, choice=choice, prompt=LOGPROBS))
        for choice in range(3)
    ]
    while not answers[0].token_ids:
        driver.plan()
        driver.deliver()
    answers.append(driver.submit(new_submit(4, prompt, 6, group_id=1, choice=3, prompt=LOGPROBS)))
    other = driver.submit(new_submit(5, prompt, 6, group_id=1, choice=4, prompt=PromptParams(num_logprobs=2)))
    driver.run()
    assert [answer.request.cached_tokens for answer in answers] == [0, 28, 28, 28]
    assert other.request.cached_tokens == 0  # wants something else of it
    for answer in (*answers, other):
        driver.check_answer(answer)


def test_when_the_first_sibling_goes_the_next_one_computes_the_prompt() -> None:
    driver = Driver(new_limits(400, 4))
    prompt = list(range(30))
    answers = [
        driver.submit(new_submit(1 + choice, prompt, 6, group_id=1, choice=choice, prompt=LOGPROBS))
        for choice in range(3)
    ]
    driver.plan()
    driver.deliver()
    driver.abort(answers[0])
    driver.run()
    for answer in answers:
        driver.check_answer(answer)


@pytest.mark.parametrize(("wish", "max_tokens"), [(LOGPROBS, 3), (LOGPROBS, 0), (LAST, 0), (MEAN, 0)])
def test_a_request_whose_parts_do_not_come_fails_alone(wish: PromptParams, max_tokens: int) -> None:
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, max_tokens, prompt=wish))
    driver.plan()
    for item in driver.core.apply_result(replace(driver.worker.deliver(), prompt_logprobs=(), embeddings=())):
        driver.record(item)
    assert answer.finish is Finish.INTERNAL_ERROR
    driver.run()
    assert driver.core.ledger.cache.num_pages == 0


def test_parts_that_cannot_be_this_requests_are_not_taken() -> None:
    """A gap, a position too many, an id without entries, another attempt, somebody who did not ask, an empty state."""
    driver = Driver(new_limits(64, 4))
    driver.submit(new_submit(1, PROMPT, 3, prompt=LOGPROBS))
    driver.submit(new_submit(2, PROMPT, 3))
    driver.submit(new_submit(3, PROMPT, 0, prompt=LAST))
    good = PromptLogprobs(id_of(1), 0, 1, pack_int32([1, 1]), pack_int32([5, 6]), pack_float32([-1.0, -2.0]))
    nine = PromptLogprobs(id_of(1), 0, 5, pack_int32([1] * 9), pack_int32([1] * 9), pack_float32([0.0] * 9))
    bad: list[PromptPart] = [
        replace(good, first_position=2),
        replace(good, counts=pack_int32([2, 0])),
        PromptLogprobs(id_of(1), 0, 1, b"", b"", b""),
        replace(good, attempt=1),
        replace(good, request_id=id_of(2)),
        Embedding(id_of(1), 0, pack_float32([1.0])),
        Embedding(id_of(3), 0, b""),
    ]
    requests = {request.request_id: request for request in driver.core.open_requests}
    driver.core.prompt_parts.take(bad, requests)
    assert driver.core.prompt_parts.drain() == []
    driver.core.prompt_parts.take([good, replace(good, first_position=3)], requests)
    assert [part.request_id for _, part in driver.core.prompt_parts.drain()] == [id_of(1)] * 2
    record = requests[id_of(1)].prompt
    assert record is not None
    assert record.next_position == 5
    driver.core.prompt_parts.take([nine], requests)
    assert driver.core.prompt_parts.drain() == []


def test_an_answer_that_had_ended_is_computed_again_for_the_sake_of_its_prompt() -> None:
    whole, _ = solo_output(new_submit(1, PROMPT, 4), 8192)
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 4, output_token_ids=whole, attempt=1, prompt=LOGPROBS))
    assert answer.finish is Finish.NONE
    driver.run()
    driver.check_answer(answer)
    assert (answer.token_ids, answer.finish) == (whole, Finish.LENGTH)


def test_a_step_holds_no_more_log_probabilities_than_fit_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_plan, "MAX_LOGPROB_TOKENS", 10)
    driver = Driver(new_limits(64, 4, token_budget=200, chunk_tokens=100))
    answers = [driver.submit(new_submit(n, [n, *PROMPT], 2, prompt=LOGPROBS)) for n in (1, 2)]
    plain = driver.submit(new_submit(3, [3, *PROMPT], 2))
    driver.run()
    assert driver.worker.step_tokens[0] == [10, 12]
    for answer in (*answers, plain):
        driver.check_answer(answer)


def test_parts_go_straight_to_the_tokenizer_and_again_when_it_asks() -> None:
    with running_pipeline(worker_card(chunk_tokens=4, max_rows=2)) as pipeline:
        pipeline.acknowledges = False
        run_all(pipeline, [new_submit(1, PROMPT, 2, prompt=LOGPROBS), new_submit(2, PROMPT, 0, prompt=MEAN)])
        parts = pipeline.tokenizer.of(PromptLogprobs)
        assert [part.first_position for part in parts] == [1, 5, 9]
        assert [len(part.counts) // 4 for part in parts] == [4, 4, 2]
        (embedding,) = pipeline.tokenizer.of(Embedding)
        assert embedding.request_id == id_of(2)
        assert pipeline.finish_of(2) is Finish.LENGTH
        pipeline.detokenizer.on_message = None
        pipeline.detokenizer.send(Resend(id_of(1), pack_int32([0]), pack_int32([0])))
        pipeline.tokenizer.send(Resend(id_of(1) + id_of(2), pack_int32([0, 0]), pack_int32([0, 0])))
        pipeline.group.pump(lambda: len(pipeline.tokenizer.of(Embedding)) == 2)
        assert pipeline.tokenizer.of(PromptLogprobs) == 2 * parts
        pipeline.acknowledges = True
