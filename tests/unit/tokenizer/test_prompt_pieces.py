"""What is asked of a prompt itself comes beside its answer: pieces, gaps, and ends that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.answer_parts import TokenLogprobs
from services.tokenizer.answer_sinks import CollectedAnswers
from services.tokenizer.api_error import ApiError
from services.tokenizer.pending_answer import PendingAnswer
from services.tokenizer.prompt_pieces import PieceGapError, PromptPieces
from services.tokenizer.stream_table import RESEND_AGAIN_S, StreamTable
from services.wire.columns import pack_float32, unpack_float32, unpack_int32, unpack_request_ids
from services.wire.errors import ProtocolError
from services.wire.finish import Finish
from services.wire.request_params import PromptParams, Task
from services.wire.requests import Submit
from services.wire.steps import Embedding
from tests.unit.tokenizer.backend_peers import chunk
from tests.unit.tokenizer.logprob_chunks import prompt_logprobs
from tests.unit.tokenizer.test_journal import new_submit

PROMPT = (5, 6, 7, 8)
TOKENS = [[(6, -1.0), (9, -0.5)], [(7, -2.0), (9, -0.5)], [(8, float("-inf")), (9, -0.5)]]


def asking(**asks: object) -> Submit:
    """A Submit that wants something of its prompt."""
    return replace(new_submit(PROMPT), prompt=PromptParams(**asks))  # type: ignore[arg-type]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(in_time())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=12))
def test_any_order_of_pieces_gives_each_position_once(spans: list[tuple[int, int]]) -> None:
    submit = asking(num_logprobs=1)
    pieces = PromptPieces(submit)
    for start, length in [*spans, (0, 3)]:
        known = len(pieces.logprobs) - 1
        piece = prompt_logprobs(submit, 1 + start, TOKENS[start : start + length])
        if start > known:
            with pytest.raises(PieceGapError):
                pieces.take_logprobs(piece)
            assert len(pieces.logprobs) - 1 == known
        else:
            assert pieces.take_logprobs(piece) == (min(start + length, 3) > known)
    assert pieces.are_complete
    assert [(entry.token_id, entry.logprob) for entry in pieces.logprobs] == [
        (5, None),
        (6, -1.0),
        (7, -2.0),
        (8, float("-inf")),
    ]


def test_only_what_was_asked_for_is_taken() -> None:
    submit = asking(num_logprobs=0, logprobs_from=3)
    pieces = PromptPieces(submit)
    assert not pieces.are_complete
    with pytest.raises(ProtocolError, match="behind the end"):
        pieces.take_logprobs(prompt_logprobs(submit, 3, TOKENS[:2]))
    with pytest.raises(ProtocolError, match="without"):
        pieces.take_logprobs(prompt_logprobs(submit, 3, [[]]))
    assert not pieces.take_embedding(Embedding(submit.request_id, 0, b""))
    assert pieces.take_logprobs(prompt_logprobs(submit, 3, TOKENS[2:]))
    assert [entry.token_id for entry in pieces.logprobs] == [8]


@pytest.mark.parametrize(("prompt", "start"), [((5,), 1), (PROMPT, 4), (PROMPT, 9)])
def test_a_prompt_without_a_wanted_position_has_nothing_to_wait_for(prompt: tuple[int, ...], start: int) -> None:
    submit = replace(new_submit(prompt), prompt=PromptParams(num_logprobs=1, logprobs_from=start))
    assert PromptPieces(submit).are_complete


def test_an_answer_ends_when_the_pieces_of_its_prompt_are_there() -> None:
    async def test() -> None:
        table, submit = StreamTable(), asking(num_logprobs=1)
        sink = CollectedAnswers([PendingAnswer(awaits_prompt=True)])
        table.open([submit], sink, 0.0)
        table.take_piece(prompt_logprobs(submit, 1, TOKENS[:1]), 1.0)
        table.take(chunk(submit, 0, [1], 0, "a", Finish.LENGTH), 1.0)
        assert not sink.done.done()
        assert table.take_acknowledgement() is None  # the scheduler must keep what it may have to send again
        assert table.take_resend(1.0 + RESEND_AGAIN_S / 2) is None
        resend = table.take_resend(1.0 + RESEND_AGAIN_S)
        assert resend is not None
        assert unpack_request_ids(resend.request_ids) == [submit.request_id]
        assert unpack_int32(resend.first_indexes) == [0]
        table.take_piece(prompt_logprobs(submit, 1, TOKENS), 2.5)
        await sink.done
        (deltas,), _ = sink.take()
        assert [entry.token_id for entry in deltas[0].prompt_logprobs] == list(PROMPT)
        acknowledgement = table.take_acknowledgement()
        assert acknowledgement is not None
        assert unpack_int32(acknowledgement.next_indexes) == [1]
        assert table.take_resend(99.0) is None

    run(test)


def test_a_gap_between_pieces_is_asked_for_at_once() -> None:
    async def test() -> None:
        table, submit = StreamTable(), asking(num_logprobs=1)
        table.open([submit], CollectedAnswers([PendingAnswer(awaits_prompt=True)]), 0.0)
        table.take_piece(prompt_logprobs(submit, 2, TOKENS[1:]), 5.0)
        assert table.take_resend(5.0) is not None
        assert table.counters.gaps == 1

    run(test)


def test_choices_of_one_prompt_share_its_pieces_and_wait_for_them_together() -> None:
    async def test() -> None:
        first = asking(num_logprobs=1)
        second = replace(new_submit(PROMPT), group_id=first.request_id)
        table = StreamTable()
        sink = CollectedAnswers([PendingAnswer(awaits_prompt=True) for _ in range(2)])
        table.open([first, second], sink, 0.0)
        for submit in (second, first):
            table.take(chunk(submit, 0, [1], 0, "a", Finish.LENGTH), 1.0)
        assert not sink.done.done()
        table.take_piece(prompt_logprobs(first, 1, TOKENS), 2.0)
        await sink.done
        answers, _ = sink.take()
        assert [len(deltas[0].prompt_logprobs) for deltas in answers] == [4, 4]

    run(test)


def test_a_prompt_of_one_token_has_its_null_at_once() -> None:
    async def test() -> None:
        table, submit = StreamTable(), replace(new_submit((5,)), prompt=PromptParams(num_logprobs=1))
        sink = CollectedAnswers([PendingAnswer("x", awaits_prompt=True, echoes_logprobs=True)])
        table.open([submit], sink, 0.0)
        table.take(chunk(submit, 0, [1], 0, "a", Finish.LENGTH), 1.0)
        await sink.done
        (deltas,), _ = sink.take()
        null = [TokenLogprobs(5, None)]
        assert (deltas[0].prompt_logprobs, deltas[0].logprobs) == (null, null)

    run(test)


@pytest.mark.parametrize("is_last", [True, False])
def test_an_embedding_comes_with_the_end_of_an_answer_without_tokens(is_last: bool) -> None:
    async def test() -> None:
        table, submit = StreamTable(), asking(task=Task.EMBED_LAST)
        sink = CollectedAnswers([PendingAnswer()])
        table.open([submit], sink, 0.0)
        embedding = Embedding(submit.request_id, 0, pack_float32([0.5, -1.0]))
        end = chunk(submit, 0, [], 0, "", Finish.LENGTH)
        if is_last:
            table.take(end, 1.0)
            table.take_piece(embedding, 1.0)
        else:
            table.take_piece(embedding, 1.0)
            table.take(end, 1.0)
        await sink.done
        _, ends = sink.take()
        assert unpack_float32(ends[0].embedding) == [0.5, -1.0]
        acknowledgement = table.take_acknowledgement()
        assert acknowledgement is not None
        assert unpack_int32(acknowledgement.next_indexes) == [0]

    run(test)


def test_prc_05_a_piece_that_nobody_asked_for_ends_its_own_request_only() -> None:
    async def test() -> None:
        table, submits = StreamTable(), [asking(num_logprobs=1), asking(num_logprobs=1)]
        sinks = [CollectedAnswers([PendingAnswer(awaits_prompt=True)]) for _ in submits]
        for submit, sink in zip(submits, sinks, strict=True):
            table.open([submit], sink, 0.0)
        table.take_piece(prompt_logprobs(submits[0], 3, TOKENS), 1.0)
        with pytest.raises(ApiError, match="internal error"):
            await sinks[0].done
        assert not sinks[1].done.done()
        table.take_piece(prompt_logprobs(new_submit(), 1, TOKENS), 1.0)
        table.take_piece(prompt_logprobs(submits[1], 1, TOKENS, attempt=1), 1.0)
        assert table.counters.late_rows == 2

    run(test)


def test_an_error_does_not_wait_for_pieces() -> None:
    async def test() -> None:
        table, submit = StreamTable(), asking(num_logprobs=1)
        sink = CollectedAnswers([PendingAnswer(awaits_prompt=True)])
        table.open([submit], sink, 0.0)
        table.take(chunk(submit, 0, [], 0, "", Finish.TIMEOUT), 1.0)
        with pytest.raises(ApiError, match="deadline"):
            await sink.done

    run(test)
