"""Log-probabilities through the scheduler: from the worker's result to the rows for a detokenizer, and again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler import token_batch
from services.scheduler.token_batch import TokenBatch
from services.wire.answers import TokensProduced
from services.wire.codec import encode
from services.wire.columns import pack_int32, split_by_counts, unpack_float32, unpack_int32
from services.wire.finish import Finish
from services.wire.requests import Resend
from tests.unit.scheduler.core_driver import Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit, solo_logprobs, solo_output
from tests.unit.scheduler.scheduler_group import id_of, run_all, running_pipeline

PROMPT = list(range(1, 12))
Entries = list[list[tuple[int, float]]]  # of the ids of an answer


def entries_of(message: TokensProduced) -> dict[tuple[bytes, int], Entries]:
    """(request id, first index) -> the entries of the row's ids."""
    pairs = list(zip(unpack_int32(message.logprob_ids), unpack_float32(message.logprobs), strict=True))
    by_id = split_by_counts(pairs, unpack_int32(message.logprob_counts))  # type: ignore[arg-type]
    by_row = split_by_counts(by_id, unpack_int32(message.counts))  # type: ignore[arg-type]
    firsts = unpack_int32(message.first_indexes)
    ids = [message.request_ids[16 * i : 16 * i + 16] for i in range(len(firsts))]
    return dict(zip(zip(ids, firsts, strict=True), by_row, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("plans_ahead", [0, 2])
def test_each_id_travels_with_its_entries_beside_a_row_without(plans_ahead: int) -> None:
    with running_pipeline(plans_ahead=plans_ahead) as pipeline:
        asking, plain = new_submit(1, PROMPT, 9, num_logprobs=2), new_submit(2, [2, *PROMPT], 9)
        run_all(pipeline, [asking, plain])
        expected = solo_logprobs(asking, solo_output(asking, 200)[0])
        got: Entries = []
        for message in pipeline.detokenizer.of(TokensProduced):
            if not message.logprob_counts:
                assert id_of(1) not in message.request_ids or not message.token_ids
                continue
            for (request_id, first), entries in entries_of(message).items():
                if request_id == id_of(1):
                    assert first == len(got)
                    got += entries
                else:
                    assert not any(entries)
        assert got == expected


def test_a_batch_without_askers_has_empty_columns() -> None:
    with running_pipeline() as pipeline:
        run_all(pipeline, [new_submit(number, PROMPT, 5) for number in (1, 2)])
        for message in pipeline.detokenizer.of(TokensProduced):
            assert (message.logprob_counts, message.logprob_ids, message.logprobs) == (b"", b"", b"")


@pytest.mark.parametrize("from_tokenizer", [False, True])
def test_what_is_sent_again_has_its_entries_again(from_tokenizer: bool) -> None:
    with running_pipeline() as pipeline:
        pipeline.acknowledges = False
        submit = new_submit(1, PROMPT, 9, num_logprobs=1)
        run_all(pipeline, [submit])
        num_before = len(pipeline.detokenizer.of(TokensProduced))
        pipeline.detokenizer.on_message = None
        sender = pipeline.tokenizer if from_tokenizer else pipeline.detokenizer
        sender.send(Resend(id_of(1), pack_int32([0]), pack_int32([4])))
        pipeline.group.pump(lambda: len(pipeline.detokenizer.of(TokensProduced)) > num_before)
        first = 0 if from_tokenizer else 4
        expected = solo_logprobs(submit, solo_output(submit, 200)[0])
        again = entries_of(pipeline.detokenizer.of(TokensProduced)[-1])
        assert again == {(id_of(1), first): expected[first:]}
        pipeline.acknowledges = True


def test_an_answer_whose_entries_are_missing_fails_instead_of_having_holes() -> None:
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 5, num_logprobs=0))
    other = driver.submit(new_submit(2, [2, *PROMPT], 5))
    driver.plan()
    result = driver.worker.deliver()
    for item in driver.core.apply_result(replace(result, logprob_counts=b"", logprob_ids=b"", logprobs=b"")):
        driver.record(item)
    assert answer.finish is Finish.INTERNAL_ERROR
    driver.run()
    driver.check_answer(other)


def test_a_stop_string_cuts_the_entries_too() -> None:
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 20, num_logprobs=1))
    for _ in range(6):
        driver.plan()
        driver.deliver()
    assert driver.stop_found(answer, 3)
    driver.run()
    driver.check_answer(answer)


def test_a_resubmitted_answer_has_entries_for_its_new_ids_only() -> None:
    whole, _ = solo_output(new_submit(1, PROMPT, 12), 8192)
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 12, output_token_ids=whole[:5], attempt=1, num_logprobs=1))
    driver.run()
    driver.check_answer(answer)
    batch = TokenBatch()
    batch.add(answer.request, 0, whole, Finish.LENGTH)
    (message,) = batch.messages()
    assert unpack_int32(message.logprob_counts) == [0] * 5 + [2] * 7


def test_long_answers_that_are_sent_again_are_cut_into_rows_and_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 20, num_logprobs=3))
    plain = driver.submit(new_submit(2, [2, *PROMPT], 20))
    driver.run()
    monkeypatch.setattr(token_batch, "MAX_IDS_OF_A_ROW", 8)
    monkeypatch.setattr(token_batch, "MAX_IDS", 50)
    batch = TokenBatch()
    for each in (answer, plain):
        batch.add(each.request, 0, each.token_ids, each.finish)
    messages = batch.messages()
    for message in messages:
        encode(message)  # holds the columns against each other
    assert [unpack_int32(message.counts) for message in messages] == [[8], [8], [4, 8, 8], [4]]
    assert [list(message.finishes) for message in messages] == [[0], [0], [2, 0, 0], [2]]
    asked = [message for message in messages if message.logprob_counts]
    assert len(asked) == 3
    rows = [entries_of(message)[id_of(1), 8 * i] for i, message in enumerate(asked)]
    assert [entries for row in rows for entries in row] == solo_logprobs(answer.request.submit, answer.token_ids)
