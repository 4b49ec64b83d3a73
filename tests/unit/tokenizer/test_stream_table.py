"""The table of open requests: what each message about an answer does, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.tokenizer.answer_parts import Text
from services.tokenizer.answer_sinks import CollectedAnswers
from services.tokenizer.api_error import ApiError
from services.tokenizer.journal import AnswerNews
from services.tokenizer.pending_answer import PendingAnswer
from services.tokenizer.stream_table import MAX_RESENDS, RESEND_AGAIN_S, StreamTable
from services.wire.columns import unpack_int32, unpack_request_ids
from services.wire.finish import Finish
from services.wire.requests import Admitted, Refused
from tests.unit.tokenizer.backend_peers import chunk, join
from tests.unit.tokenizer.test_journal import new_submit


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(in_time())


def collected(num_answers: int = 1) -> CollectedAnswers:
    return CollectedAnswers([PendingAnswer() for _ in range(num_answers)])


def texts(sink: CollectedAnswers) -> list[str]:
    """The texts of answers that are all complete."""
    answers, _ = sink.take()
    parts = [[part for delta in deltas for part in delta.parts] for deltas in answers]
    return ["".join(part.text for part in answer if isinstance(part, Text)) for answer in parts]


def test_a_gap_asks_for_everything_again_once_a_second_until_it_closes() -> None:
    async def test() -> None:
        table, submit, sink = StreamTable(), new_submit(), collected()
        table.open([submit], sink, 0.0)
        table.take(chunk(submit, 0, [1], 0, "a"), 1.0)
        table.take(chunk(submit, 2, [3], 2, "c"), 2.0)
        resend = table.take_resend(2.0)
        assert resend is not None
        assert unpack_request_ids(resend.request_ids) == [submit.request_id]
        assert unpack_int32(resend.first_indexes) == [0]
        table.take(chunk(submit, 2, [3], 2, "c"), 2.1)
        assert table.take_resend(2.0 + RESEND_AGAIN_S / 2) is None
        assert table.take_resend(2.0 + RESEND_AGAIN_S) is not None
        table.take(chunk(submit, 0, [1, 2, 3], 0, "abc", Finish.LENGTH), 3.5)
        await sink.done
        assert texts(sink) == ["abc"]
        assert table.take_resend(9.0) is None

    run(test)


def test_an_answer_that_stays_incomplete_fails_alone() -> None:
    async def test() -> None:
        table, submits = StreamTable(), [new_submit(), new_submit()]
        sinks = [collected(), collected()]
        for submit, sink in zip(submits, sinks, strict=True):
            table.open([submit], sink, 0.0)
        table.take(chunk(submits[0], 2, [3], 2, "c"), 0.0)
        for second in range(1, MAX_RESENDS + 2):
            table.take_resend(second * RESEND_AGAIN_S)
        with pytest.raises(ApiError, match="internal error"):
            await sinks[0].done
        assert not sinks[1].done.done()

    run(test)


@pytest.mark.parametrize(
    ("finish", "level"),
    [
        (Finish.TIMEOUT, "INFO"),
        (Finish.ABORTED, "INFO"),
        (Finish.GRAMMAR_TOO_LARGE, "INFO"),
        (Finish.BACKEND_LOST, "ERROR"),
        (Finish.NUMERICAL_ERROR, "ERROR"),
    ],
)
def test_an_end_that_somebody_wanted_is_no_error_of_the_log(
    finish: Finish, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        table, submit = StreamTable(), new_submit()
        table.open([submit], collected(), 0.0)
        table.take(chunk(submit, 0, [], 0, "", finish), 1.0)

    with caplog.at_level("INFO"):
        run(test)
    assert [record.levelname for record in caplog.records if "an answer ended" in record.message] == [level]


def test_acknowledgements_are_cumulative_and_one_message() -> None:
    async def test() -> None:
        table, submits = StreamTable(), [new_submit(), new_submit()]
        table.open(submits, collected(2), 0.0)
        assert table.take_acknowledgement() is None
        table.take(join([chunk(submits[0], 0, [1, 2], 0, "ab"), chunk(submits[1], 0, [1], 0, "a")]), 1.0)
        table.take(chunk(submits[0], 2, [3], 2, "c", Finish.LENGTH), 1.1)
        message = table.take_acknowledgement()
        assert message is not None
        acknowledged = zip(unpack_request_ids(message.request_ids), unpack_int32(message.next_indexes), strict=True)
        assert dict(acknowledged) == {submits[0].request_id: 3, submits[1].request_id: 1}
        assert table.take_acknowledgement() is None

    run(test)


def test_closing_aborts_what_has_not_ended_and_nothing_else() -> None:
    async def test() -> None:
        table, submits = StreamTable(), [new_submit(), new_submit()]
        request = table.open(submits, collected(2), 0.0)
        table.take(chunk(submits[0], 0, [1], 0, "a", Finish.LENGTH), 1.0)
        abort = table.close(request)
        assert abort is not None
        assert unpack_request_ids(abort.request_ids) == [submits[1].request_id]
        assert table.close(request) is None
        assert (table.num_answers, table.counters.aborted_answers) == (0, 1)
        table.take(chunk(submits[1], 0, [1], 0, "a"), 2.0)
        assert table.counters.late_rows == 1

    run(test)


def test_one_refusal_fails_the_request_and_late_words_change_nothing() -> None:
    async def test() -> None:
        table, submits = StreamTable(), [new_submit(), new_submit()]
        request = table.open(submits, collected(2), 0.0)
        table.admit(Admitted(submits[0].request_id, 0))
        table.admit(Admitted(submits[1].request_id, 1))
        assert not request.admission.done()
        table.refuse(Refused(submits[1].request_id, 0, 503, "queue_full", "full", "", 0))
        with pytest.raises(ApiError, match="full") as caught:
            await request.admission
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        abort = table.close(request)
        assert abort is not None
        assert unpack_request_ids(abort.request_ids) == [submits[0].request_id]
        table.admit(Admitted(submits[1].request_id, 0))
        table.refuse(Refused(submits[1].request_id, 0, 503, "queue_full", "full", "", 0))

    run(test)


def test_prc_05_a_row_that_raises_ends_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenSink(CollectedAnswers):
        def add(self, choice: int, news: AnswerNews) -> None:
            raise ZeroDivisionError

    async def test() -> None:
        table, submits = StreamTable(), [new_submit() for _ in range(3)]
        sinks = [collected(), BrokenSink([PendingAnswer()]), collected()]
        for submit, sink in zip(submits, sinks, strict=True):
            table.open([submit], sink, 0.0)
        table.take(join(chunk(submit, 0, [1], 0, "a", Finish.LENGTH) for submit in submits), 1.0)
        with pytest.raises(ApiError) as caught:
            await sinks[1].done
        assert caught.value.status == 500
        assert [texts(sinks[0]), texts(sinks[2])] == [["a"], ["a"]]
        assert caught.value.message.rsplit(" ", 1)[1] in caplog.text

    run(test)


def test_latencies_are_counted_from_the_request_and_between_chunks() -> None:
    async def test() -> None:
        table, submit = StreamTable(), new_submit()
        table.open([submit], collected(), 10.0)
        table.take(chunk(submit, 0, [1], 0, "a"), 10.5)
        table.take(chunk(submit, 1, [2], 1, "b"), 10.52)
        first, later = (
            {sample.labels.get("le", sample.name): sample.value for sample in histogram.family("x", "y").samples}
            for histogram in (table.first_token_s, table.inter_token_s)
        )
        assert (first["0.25"], first["0.5"], first["+Inf"], first["x_count"]) == (0, 1, 1, 1)
        assert (later["0.01"], later["0.03"], later["x_count"]) == (0, 1, 1)
        assert later["x_sum"] == pytest.approx(0.02)

    run(test)
