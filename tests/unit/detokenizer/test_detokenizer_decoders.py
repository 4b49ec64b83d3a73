"""The table of open answers: who gets what, what is dropped, asked for again, or failed alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from services.detokenizer.answer import AnswerChunk, AnswerDecoder
from services.detokenizer.decoders import IDS_UNDER_WAY, MAX_IDS_OF_A_CHUNK, ROWS_BETWEEN_ASKS, Decoders
from services.detokenizer.incremental import TokenPieces
from services.detokenizer.outgoing import MAX_CHUNK_BYTES
from services.wire.answers import DecodeFailed, DecodeOpen, StopFound, TextChunks, TokensProduced
from services.wire.codec import encode
from services.wire.columns import pack_int32, split_by_counts, unpack_int32, unpack_request_ids
from services.wire.errors import ProtocolError
from services.wire.finish import Finish
from services.wire.forms import MAX_FRAME_BYTES
from services.wire.request_params import TextParams
from services.wire.requests import Resend

A, B, C = (bytes([letter]) * 16 for letter in b"abc")
LEFT, RIGHT = b"tokenizer/left/1", b"tokenizer/right/2"
WORDS = [b"one ", b"two ", b"three ", b"\xf0\x9f\x98", b"\x80", b"stop", b"\xe4\xbd\xa0" * 80]


class Table:
    num_entries = len(WORDS)

    def token_bytes(self, token_id: int) -> bytes:
        return WORDS[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


class Row(NamedTuple):
    """One row of TextChunks."""

    request_id: bytes
    attempt: int
    first_index: int
    ids: list[int]
    text_offset: int
    text: str
    finish: Finish
    completion_tokens: int
    cached_tokens: int


@dataclass
class Sent:
    chunks: dict[bytes, list[Row]]
    to_scheduler: list[object]


def rows_of(message: TextChunks) -> list[Row]:
    return [
        Row(*columns)
        for columns in zip(
            unpack_request_ids(message.request_ids),
            unpack_int32(message.attempts),
            unpack_int32(message.first_indexes),
            split_by_counts(unpack_int32(message.token_ids), unpack_int32(message.counts)),
            unpack_int32(message.text_offsets),
            message.texts,
            map(Finish, message.finishes),
            unpack_int32(message.completion_tokens),
            unpack_int32(message.cached_tokens),
            strict=True,
        )
    ]


def taken(decoders: Decoders) -> Sent:
    outgoing = decoders.take_outgoing()
    chunks: dict[bytes, list[Row]] = {}
    for tokenizer, message in outgoing.for_tokenizers():
        chunks.setdefault(tokenizer, []).extend(rows_of(message))
    return Sent(chunks, list(outgoing.for_scheduler()))


def opening(request_id: bytes, attempt: int = 0, tokenizer: bytes = LEFT, stop: tuple[str, ...] = ()) -> DecodeOpen:
    return DecodeOpen(request_id, attempt, tokenizer, TextParams(stop, False, True, 0))


def produced(*rows: tuple[bytes, int, int, Sequence[int], Finish]) -> TokensProduced:
    request_ids, attempts, first_indexes, runs, finishes = zip(*rows, strict=True)
    return TokensProduced(
        request_ids=b"".join(request_ids),
        attempts=pack_int32(attempts),
        first_indexes=pack_int32(first_indexes),
        counts=pack_int32([len(run) for run in runs]),
        token_ids=pack_int32([token_id for run in runs for token_id in run]),
        finishes=bytes(finishes),
        cached_tokens=pack_int32([7] * len(rows)),
    )


@pytest.fixture
def decoders() -> Decoders:
    return Decoders(TokenPieces(Table()))


def test_each_tokenizer_gets_one_message_with_its_rows(decoders: Decoders) -> None:
    for message in (opening(A), opening(B, tokenizer=RIGHT), opening(C)):
        decoders.open(message)
    decoders.advance(
        produced((A, 0, 0, [0, 3], Finish.NONE), (B, 0, 0, [1], Finish.LENGTH), (C, 0, 0, [2], Finish.NONE))
    )
    decoders.advance(produced((A, 0, 2, [4], Finish.LENGTH)))
    sent = taken(decoders)
    assert sent.chunks == {
        LEFT: [
            Row(C, 0, 0, [2], 0, "three ", Finish.NONE, 0, 7),  # plain rows go before others of their batch
            Row(A, 0, 0, [0, 3], 0, "one ", Finish.NONE, 0, 7),
            Row(A, 0, 2, [4], 4, "😀", Finish.LENGTH, 3, 7),
        ],
        RIGHT: [Row(B, 0, 0, [1], 0, "two ", Finish.LENGTH, 1, 7)],
    }
    assert sent.to_scheduler == []
    assert (decoders.num_open, decoders.statistics.num_tokens) == (1, 5)
    assert taken(decoders) == Sent({}, [])


def test_rows_that_come_twice_or_belong_to_another_attempt_are_dropped(decoders: Decoders) -> None:
    decoders.open(opening(A, attempt=2))
    decoders.advance(produced((A, 2, 0, [0], Finish.NONE), (A, 2, 0, [0], Finish.NONE), (A, 1, 1, [1], Finish.NONE)))
    decoders.open(opening(A, attempt=1))
    decoders.advance(produced((A, 2, 1, [1], Finish.LENGTH), (A, 2, 1, [1], Finish.LENGTH)))
    sent = taken(decoders)
    assert [row.text for row in sent.chunks[LEFT]] == ["one ", "two "]
    assert sent.to_scheduler == []
    assert decoders.statistics.num_old_rows == 4


def test_a_gap_is_asked_for_once_and_filled_by_the_resend(decoders: Decoders) -> None:
    decoders.open(opening(A))
    decoders.advance(produced((A, 0, 0, [0], Finish.NONE), (A, 0, 2, [2], Finish.NONE), (A, 0, 3, [0], Finish.LENGTH)))
    sent = taken(decoders)
    assert [row.text for row in sent.chunks[LEFT]] == ["one "]
    assert sent.to_scheduler == [Resend(A, pack_int32([0]), pack_int32([1]))]
    decoders.advance(produced((A, 0, 1, [1, 2, 0], Finish.LENGTH)))
    assert taken(decoders) == Sent({LEFT: [Row(A, 0, 1, [1, 2, 0], 4, "two three one ", Finish.LENGTH, 4, 7)]}, [])


def test_a_gap_is_asked_for_again_when_rows_keep_coming(decoders: Decoders) -> None:
    decoders.open(opening(A))
    for index in range(1, 2 * ROWS_BETWEEN_ASKS):
        decoders.advance(produced((A, 0, index, [0], Finish.NONE)))
    assert decoders.statistics.num_resends_asked == 2


def test_an_unknown_answer_is_asked_for_from_the_start_and_its_opening_replays_it(decoders: Decoders) -> None:
    decoders.advance(produced((A, 3, 5, [0], Finish.NONE), (A, 3, 6, [0], Finish.NONE)))
    assert taken(decoders) == Sent({}, [Resend(A, pack_int32([3]), pack_int32([0]))])
    decoders.open(opening(A, attempt=3))
    decoders.advance(produced((A, 3, 0, [0, 1], Finish.NONE)))
    assert [row.text for row in taken(decoders).chunks[LEFT]] == ["one two "]
    for index in range(1, 2 * ROWS_BETWEEN_ASKS):
        decoders.advance(produced((B, 0, index, [0], Finish.NONE)))
    assert decoders.statistics.num_resends_asked == 3


def test_a_higher_attempt_than_the_open_one_is_asked_for(decoders: Decoders) -> None:
    decoders.open(opening(A))
    decoders.advance(produced((A, 1, 0, [0], Finish.NONE)))
    assert taken(decoders).to_scheduler == [Resend(A, pack_int32([1]), pack_int32([0]))]


@pytest.mark.parametrize("finish", [Finish.NONE, Finish.LENGTH])
def test_an_answer_that_is_opened_again_gives_the_same_text_at_the_same_offsets(
    decoders: Decoders, finish: Finish
) -> None:
    def once() -> tuple[str, list[int]]:
        decoders.open(opening(A, stop=("stop",)))
        for index, token_id in enumerate(ids):
            ends = finish if index == len(ids) - 1 else Finish.NONE
            decoders.advance(produced((A, 0, index, [token_id], ends)))
        rows = taken(decoders).chunks[LEFT]
        return "".join(row.text for row in rows), [row.text_offset for row in rows]

    ids = [0, 3, 4, 6, 1]
    assert once() == once()


def test_a_stop_string_ends_the_answer_and_is_told_to_the_scheduler(decoders: Decoders) -> None:
    decoders.open(opening(A, stop=("stop",)))
    decoders.advance(produced((A, 0, 0, [0, 5, 1], Finish.NONE)))
    assert taken(decoders) == Sent(
        {LEFT: [Row(A, 0, 0, [0, 5], 0, "one ", Finish.STOP_STRING, 2, 7)]},
        [StopFound(A, pack_int32([0]), pack_int32([2]))],
    )
    assert decoders.num_open == 0
    decoders.advance(produced((A, 0, 3, [1], Finish.NONE), (A, 0, 4, [1], Finish.LENGTH)))
    assert taken(decoders) == Sent({}, [])


def test_a_scheduler_that_goes_on_past_a_stop_string_is_told_again(decoders: Decoders) -> None:
    decoders.open(opening(A, stop=("stop",)))
    decoders.advance(produced((A, 0, 0, [5], Finish.NONE)))
    taken(decoders)
    beyond = 1 + IDS_UNDER_WAY
    decoders.advance(produced(*((A, 0, index, [1], Finish.NONE) for index in range(1, beyond))))
    assert taken(decoders) == Sent({}, [])
    decoders.advance(produced((A, 0, beyond, [1], Finish.NONE), (A, 0, beyond + 1, [1], Finish.NONE)))
    assert taken(decoders) == Sent({}, [StopFound(A, pack_int32([0]), pack_int32([1]))])


def test_a_stop_string_at_the_last_token_wins_over_the_limit(decoders: Decoders) -> None:
    decoders.open(opening(A, stop=("stop",)))
    decoders.advance(produced((A, 0, 0, [0, 5], Finish.LENGTH)))
    sent = taken(decoders)
    assert [(row.finish, row.completion_tokens) for row in sent.chunks[LEFT]] == [(Finish.STOP_STRING, 2)]
    assert sent.to_scheduler == [StopFound(A, pack_int32([0]), pack_int32([2]))]


def test_prc_05_a_row_that_raises_fails_alone(decoders: Decoders, caplog: pytest.LogCaptureFixture) -> None:
    for letter in b"abcdefghi":
        decoders.open(opening(bytes([letter]) * 16))
    streams = [bytes([letter]) * 16 for letter in b"bcdefghi"]
    with caplog.at_level(logging.ERROR):
        bad = (A, 0, 0, [0, -5], Finish.NONE)
        decoders.advance(produced(bad, *((stream, 0, 0, [1], Finish.NONE) for stream in streams)))
    sent = taken(decoders)
    assert sent.chunks[LEFT] == [
        *(Row(stream, 0, 0, [1], 0, "two ", Finish.NONE, 0, 7) for stream in streams),
        Row(A, 0, 0, [], 0, "", Finish.INTERNAL_ERROR, 0, 0),
    ]
    assert sent.to_scheduler == [DecodeFailed(A, pack_int32([0]))]
    assert "could not be decoded" in caplog.text
    decoders.advance(produced((A, 0, 1, [0], Finish.NONE), (B, 0, 1, [2], Finish.LENGTH)))
    assert [row.text for row in taken(decoders).chunks[LEFT]] == ["three "]


def test_prc_05_a_fault_in_the_decoder_itself_fails_alone(
    decoders: Decoders, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for request_id in (A, B):
        decoders.open(opening(request_id))
    decoders.advance(produced((A, 0, 0, [0], Finish.NONE)))
    original = AnswerDecoder.advance

    def fault_on_two(
        self: AnswerDecoder, first_index: int, token_ids: Sequence[int], finish: Finish
    ) -> AnswerChunk | None:
        if 2 in token_ids:
            raise RuntimeError("injected")
        return original(self, first_index, token_ids, finish)

    take_next = AnswerDecoder.take_next

    def fault_on_two_alone(self: AnswerDecoder, token_id: int) -> str | AnswerChunk:
        if token_id == 2:
            raise RuntimeError("injected")
        return take_next(self, token_id)

    monkeypatch.setattr(AnswerDecoder, "advance", fault_on_two)
    monkeypatch.setattr(AnswerDecoder, "take_next", fault_on_two_alone)
    decoders.advance(produced((A, 0, 1, [2], Finish.NONE), (B, 0, 0, [1], Finish.NONE)))
    sent = taken(decoders)
    assert sent.chunks[LEFT][1:] == [
        Row(B, 0, 0, [1], 0, "two ", Finish.NONE, 0, 7),
        Row(A, 0, 1, [], 4, "", Finish.INTERNAL_ERROR, 1, 0),
    ]
    assert decoders.statistics.num_failed == 1
    assert "injected" in caplog.text


def test_prc_05_an_answer_that_cannot_be_opened_fails_alone(decoders: Decoders) -> None:
    decoders.open(opening(A, stop=("", "x")))
    decoders.open(opening(B))
    decoders.advance(produced((A, 0, 0, [0], Finish.NONE), (B, 0, 0, [1], Finish.NONE)))
    sent = taken(decoders)
    assert [(row.request_id, row.finish) for row in sent.chunks[LEFT]] == [
        (A, Finish.INTERNAL_ERROR),
        (B, Finish.NONE),
    ]
    assert sent.to_scheduler == [DecodeFailed(A, pack_int32([0]))]


def test_a_message_whose_columns_disagree_is_refused_whole(decoders: Decoders) -> None:
    decoders.open(opening(A))
    good = produced((A, 0, 0, [0], Finish.NONE))
    for fields in ({"counts": pack_int32([2])}, {"counts": pack_int32([-1])}):
        columns = {name: getattr(good, name) for name in TokensProduced.__dataclass_fields__} | fields
        with pytest.raises(ProtocolError):
            decoders.advance(TokensProduced(**columns))
    assert taken(decoders) == Sent({}, [])
    decoders.advance(good)
    assert [row.text for row in taken(decoders).chunks[LEFT]] == ["one "]


def test_det_11_no_number_of_open_answers_evicts_a_live_one(decoders: Decoders) -> None:
    request_ids = [number.to_bytes(16, "big") for number in range(20_000)]
    ids = [0, 3, 4, 1]
    for request_id in request_ids:
        decoders.open(opening(request_id, stop=("stop",)))
    texts = dict.fromkeys(request_ids, "")
    for index, token_id in enumerate(ids):
        finish = Finish.LENGTH if index == len(ids) - 1 else Finish.NONE
        decoders.advance(produced(*((request_id, 0, index, [token_id], finish) for request_id in request_ids)))
        sent = taken(decoders)
        assert sent.to_scheduler == []
        for row in sent.chunks[LEFT]:
            texts[row.request_id] += row.text
    assert set(texts.values()) == {"one 😀two "}
    assert decoders.num_open == 0


def test_a_long_replay_comes_in_chunks_that_fit_a_frame(decoders: Decoders) -> None:
    decoders.open(opening(A))
    ids = [6] * (5 * MAX_IDS_OF_A_CHUNK)
    decoders.advance(produced((A, 0, 0, ids, Finish.LENGTH)))
    outgoing = decoders.take_outgoing()
    messages = [message for _, message in outgoing.for_tokenizers()]
    assert len(messages) > 1
    assert all(len(encode(message)) < MAX_CHUNK_BYTES + 3_000_000 < MAX_FRAME_BYTES for message in messages)
    rows = [row for message in messages for row in rows_of(message)]
    assert "".join(row.text for row in rows) == "你" * 80 * len(ids)
    assert [row.finish for row in rows] == [Finish.NONE] * 4 + [Finish.LENGTH]
    assert [row.text_offset for row in rows] == [240 * MAX_IDS_OF_A_CHUNK * part for part in range(5)]


def test_a_stop_string_inside_a_long_replay_ends_it(decoders: Decoders) -> None:
    decoders.open(opening(A, stop=("stop",)))
    decoders.advance(produced((A, 0, 0, [0] * 5000 + [5] + [0] * 9000, Finish.LENGTH)))
    sent = taken(decoders)
    assert [(row.first_index, row.finish) for row in sent.chunks[LEFT]] == [
        (0, Finish.NONE),
        (MAX_IDS_OF_A_CHUNK, Finish.STOP_STRING),
    ]
    assert sent.to_scheduler == [StopFound(A, pack_int32([0]), pack_int32([5001]))]


def test_the_answers_of_a_tokenizer_that_is_gone_are_forgotten(decoders: Decoders) -> None:
    decoders.open(opening(A))
    decoders.open(opening(B, tokenizer=RIGHT))
    decoders.drop_tokenizers({LEFT})
    decoders.advance(produced((A, 0, 0, [0], Finish.NONE), (B, 0, 0, [1], Finish.NONE)))
    sent = taken(decoders)
    assert [row.request_id for row in sent.chunks[RIGHT]] == [B]
    assert LEFT not in sent.chunks
    assert sent.to_scheduler == [DecodeFailed(A, pack_int32([0]))]


def test_end_all_tells_every_client_and_the_scheduler(decoders: Decoders) -> None:
    decoders.open(opening(A))
    decoders.open(opening(B, tokenizer=RIGHT))
    decoders.advance(produced((A, 0, 0, [0, 3], Finish.NONE)))
    taken(decoders)
    decoders.end_all(Finish.BACKEND_LOST)
    assert taken(decoders) == Sent(
        {
            LEFT: [Row(A, 0, 2, [], 4, "", Finish.BACKEND_LOST, 2, 0)],
            RIGHT: [Row(B, 0, 0, [], 0, "", Finish.BACKEND_LOST, 0, 0)],
        },
        [DecodeFailed(A + B, pack_int32([0, 0]))],
    )
    assert decoders.num_open == 0
