"""Log-probabilities on their way through the detokenizer: they stay with their ids, whatever becomes of these."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.detokenizer.decoders import MAX_IDS_OF_A_CHUNK, Decoders
from services.detokenizer.incremental import TokenPieces
from services.wire.answers import StopFound, TextChunks, TokensProduced
from services.wire.codec import encode
from services.wire.columns import pack_float32, pack_int32, split_by_counts, unpack_float32, unpack_int32
from services.wire.finish import Finish
from tests.unit.detokenizer.test_detokenizer_decoders import LEFT, RIGHT, A, B, Table, opening, produced, rows_of

NUM_ENTRIES = 2  # of each id in these tests: the id itself and one more


@pytest.fixture
def decoders() -> Decoders:
    return Decoders(TokenPieces(Table()))


def with_logprobs(batch: TokensProduced, asks: list[bool]) -> TokensProduced:
    """The batch with entries for the ids of rows that ask: value = -(index of the id in its answer)."""
    counts, ids, values = [], [], []
    runs = split_by_counts(unpack_int32(batch.token_ids), unpack_int32(batch.counts))
    for row_asks, first, run in zip(asks, unpack_int32(batch.first_indexes), runs, strict=True):
        for index, token_id in enumerate(run, first):
            counts.append(NUM_ENTRIES if row_asks else 0)
            ids += [token_id, 6] if row_asks else []
            values += [-float(index), -0.5] if row_asks else []
    return replace(batch, logprob_counts=pack_int32(counts), logprob_ids=pack_int32(ids), logprobs=pack_float32(values))


def chunks_for(decoders: Decoders) -> dict[bytes, TextChunks]:
    outgoing = decoders.take_outgoing()
    chunks = dict(outgoing.for_tokenizers())
    for message in chunks.values():
        encode(message)  # holds the columns against each other
    return chunks


def entries_of(message: TextChunks) -> list[list[list[tuple[int, float]]]]:
    """For each row, for each id, its entries."""
    entries = zip(unpack_int32(message.logprob_ids), unpack_float32(message.logprobs), strict=True)
    by_id = split_by_counts(list(entries), unpack_int32(message.logprob_counts))  # type: ignore[arg-type]
    return split_by_counts(by_id, unpack_int32(message.counts))  # type: ignore[arg-type, return-value]


def test_rows_keep_their_own_and_those_who_did_not_ask_have_none(decoders: Decoders) -> None:
    decoders.open(opening(A))
    decoders.open(opening(B))
    batch = produced((A, 0, 0, [0, 3], Finish.NONE), (B, 0, 0, [1, 2, 0], Finish.LENGTH))
    decoders.advance(with_logprobs(batch, [False, True]))
    (message,) = chunks_for(decoders).values()
    assert entries_of(message) == [
        [[], []],
        [[(1, -0.0), (6, -0.5)], [(2, -1.0), (6, -0.5)], [(0, -2.0), (6, -0.5)]],
    ]


def test_a_batch_without_any_has_empty_columns(decoders: Decoders) -> None:
    decoders.open(opening(A))
    decoders.open(opening(B, tokenizer=RIGHT))
    decoders.advance(produced((A, 0, 0, [0, 3], Finish.NONE), (B, 0, 0, [1], Finish.NONE)))
    for message in chunks_for(decoders).values():
        assert (message.logprob_counts, message.logprob_ids, message.logprobs) == (b"", b"", b"")
    batch = produced((A, 0, 2, [0], Finish.NONE), (B, 0, 1, [1], Finish.NONE))
    decoders.advance(with_logprobs(batch, [False, True]))
    chunks = chunks_for(decoders)
    assert chunks[LEFT].logprob_counts == b""
    assert entries_of(chunks[RIGHT]) == [[[(1, -1.0), (6, -0.5)]]]


def test_entries_behind_a_stop_string_are_lost_with_their_ids(decoders: Decoders) -> None:
    decoders.open(opening(A, stop=("stop",)))
    decoders.advance(with_logprobs(produced((A, 0, 0, [0, 5, 1, 2], Finish.LENGTH)), [True]))
    outgoing = decoders.take_outgoing()
    ((_, message),) = outgoing.for_tokenizers()
    assert rows_of(message)[0].finish is Finish.STOP_STRING
    assert entries_of(message) == [[[(0, -0.0), (6, -0.5)], [(5, -1.0), (6, -0.5)]]]
    assert any(isinstance(item, StopFound) for item in outgoing.for_scheduler())


def test_withheld_text_does_not_withhold_the_entries_of_its_ids(decoders: Decoders) -> None:
    """A begun character: the ids travel at once, the text comes with the next chunk; so do their entries."""
    decoders.open(opening(A))
    decoders.advance(with_logprobs(produced((A, 0, 0, [3], Finish.NONE)), [True]))
    (message,) = chunks_for(decoders).values()
    assert message.texts == ("",)
    assert entries_of(message) == [[[(3, -0.0), (6, -0.5)]]]
    decoders.advance(with_logprobs(produced((A, 0, 1, [4], Finish.NONE)), [True]))
    (message,) = chunks_for(decoders).values()
    assert message.texts == ("😀",)
    assert entries_of(message) == [[[(4, -1.0), (6, -0.5)]]]


def test_a_replay_gives_only_the_entries_of_new_ids(decoders: Decoders) -> None:
    decoders.open(opening(A))
    decoders.advance(with_logprobs(produced((A, 0, 0, [0, 1], Finish.NONE)), [True]))
    chunks_for(decoders)
    decoders.advance(with_logprobs(produced((A, 0, 0, [0, 1, 2, 1], Finish.LENGTH)), [True]))
    (message,) = chunks_for(decoders).values()
    assert rows_of(message)[0].ids == [2, 1]
    assert entries_of(message) == [[[(2, -2.0), (6, -0.5)], [(1, -3.0), (6, -0.5)]]]


def test_a_finish_alone_has_no_entries(decoders: Decoders) -> None:
    decoders.open(opening(A))
    decoders.advance(with_logprobs(produced((A, 0, 0, [0], Finish.NONE)), [True]))
    chunks_for(decoders)
    decoders.advance(produced((A, 0, 1, [], Finish.TIMEOUT)))
    (message,) = chunks_for(decoders).values()
    assert (rows_of(message)[0].finish, message.logprob_counts) == (Finish.TIMEOUT, b"")


def test_a_long_replay_comes_in_pieces_with_their_entries(decoders: Decoders) -> None:
    decoders.open(opening(A))
    ids = [0, 1] * MAX_IDS_OF_A_CHUNK
    decoders.advance(with_logprobs(produced((A, 0, 0, ids, Finish.LENGTH)), [True]))
    rows = [row for message in chunks_for(decoders).values() for row in entries_of(message)]
    assert [len(row) for row in rows] == [MAX_IDS_OF_A_CHUNK] * 2
    assert [entries[0][1] for row in rows for entries in row] == [-float(index) for index in range(len(ids))]
