"""Detokenizer process: the rows of a batch that are one id each and end nothing, taken as columns.

Nearly every row of a busy server is one. What goes out for them is what came in, with texts: the columns are not taken
apart. `Decoders` says which rows these are; all others go through `outgoing.ChunkRows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from services.detokenizer.answer import AnswerChunk, OpenAnswer
from services.wire.answers import TextChunks, TokensProduced
from services.wire.columns import REQUEST_ID_BYTES, pack_int32, unpack_int32, unpack_request_ids

MAX_ROWS_TOGETHER = 4_096  # of a batch: far below what a message of chunks may hold
MAX_CHARACTERS_TOGETHER = 2**20  # of their texts
_ONE = pack_int32([1])


def may_go_together(batch: TokensProduced) -> bool:
    """Whether rows of a batch may be taken as columns: these fit together, and nobody asked for log-probabilities."""
    num_rows = len(batch.finishes)
    columns = (batch.attempts, batch.first_indexes, batch.counts, batch.cached_tokens)
    return (
        num_rows <= MAX_ROWS_TOGETHER
        and not batch.logprob_counts
        and len(batch.request_ids) == REQUEST_ID_BYTES * num_rows
        and [4 * num_rows] * len(columns) == [*map(len, columns)]
        and (_has_one_each(batch) or 4 * sum(unpack_int32(batch.counts)) == len(batch.token_ids))
    )


def _has_one_each(batch: TokensProduced) -> bool:
    """Whether every row has exactly one id."""
    return len(batch.token_ids) == len(batch.counts) and batch.counts == _ONE * len(batch.finishes)


class TogetherRows:
    """Rows for one tokenizer: their places in the batch, and what they gave."""

    __slots__ = ("_batch", "rows")

    def __init__(self, batch: TokensProduced) -> None:
        self._batch = batch
        self.rows: list[tuple[int, int, str, int]] = []
        """Place, id, text, and where in the answer's text that begins."""

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Their ids."""
        return len(self.rows)

    @property
    def most_bytes(self) -> int:
        """Of all columns, counting four bytes a character."""
        return 4 * sum([len(text) for _, _, text, _ in self.rows]) + 64 * len(self.rows)

    def message(self) -> TextChunks:
        """The rows as they travel."""
        batch, num_rows = self._batch, len(self.rows)
        places, token_ids, texts, text_offsets = zip(*self.rows, strict=True)
        is_whole = num_rows == len(batch.finishes)  # nearly always: then each row of the batch is one id
        return TextChunks(
            request_ids=batch.request_ids if is_whole else _picked(batch.request_ids, places, REQUEST_ID_BYTES),
            attempts=batch.attempts if is_whole else _picked(batch.attempts, places, 4),
            first_indexes=batch.first_indexes if is_whole else _picked(batch.first_indexes, places, 4),
            counts=_ONE * num_rows,
            token_ids=batch.token_ids if is_whole else pack_int32(token_ids),
            text_offsets=pack_int32(text_offsets),
            texts=texts,
            finishes=bytes(num_rows),
            completion_tokens=bytes(4 * num_rows),
            cached_tokens=batch.cached_tokens if is_whole else _picked(batch.cached_tokens, places, 4),
        )


def _picked(column: bytes, places: Sequence[int], item_bytes: int) -> bytes:
    return np.frombuffer(column, f"V{item_bytes}")[list(places)].tobytes()


@dataclass(slots=True)
class Taken:
    """What a batch gave.

    Attributes:
        is_taken: for each row of the batch 1 or 0.
        runs: by tokenizer, rows of answers that go on.
        stopped: answers that a stop string ended: request id, answer, its last chunk, tokens from the cache.
        failed: answers that could not be decoded: request id, answer, where its text had got to, why.
    """

    is_taken: bytearray
    runs: dict[bytes, TogetherRows] = field(default_factory=dict)
    stopped: list[tuple[bytes, OpenAnswer, AnswerChunk, int]] = field(default_factory=list)
    failed: list[tuple[bytes, OpenAnswer, int, Exception]] = field(default_factory=list)


def advance_together(batch: TokensProduced, answers: Mapping[bytes, OpenAnswer]) -> Taken:
    """Feeds the rows that are one id which continues an answer, with no word that it ends.

    The others are to be taken after them, and with a row all later ones of the same answer.

    Args:
        batch: one that `may_go_together`.
        answers: the open ones, by request id.
    """
    taken = Taken(bytearray(len(batch.finishes)))
    is_taken, runs = taken.is_taken, taken.runs
    num_characters = 0
    apart: set[bytes] = set()  # answers with a row that is still to be taken
    tokenizer: bytes | None = None
    run = TogetherRows(batch)
    counts, ids = unpack_int32(batch.counts), unpack_int32(batch.token_ids)
    if not _has_one_each(batch):
        ids = [ids[end - 1] if count else 0 for count, end in zip(counts, accumulate(counts), strict=True)]
    columns = (unpack_request_ids(batch.request_ids), unpack_int32(batch.attempts), unpack_int32(batch.first_indexes))
    rows = zip(*columns, ids, counts, batch.finishes, strict=True)
    for place, (request_id, attempt, first_index, token_id, count, finish) in enumerate(rows):
        answer = answers.get(request_id)
        if count != 1 or finish or answer is None or answer.attempt != attempt or request_id in apart:
            apart.add(request_id)
            continue
        decoder = answer.decoder
        if num_characters > MAX_CHARACTERS_TOGETHER or decoder.next_index != first_index or decoder.has_ended:
            apart.add(request_id)
            continue
        is_taken[place] = 1
        text_offset = decoder.text_offset
        try:
            text = decoder.take_next(token_id)
        except Exception as error:  # this answer's own fault: the others go on
            taken.failed.append((request_id, answer, text_offset, error))
            continue
        answer.num_chunks += 1
        if not isinstance(text, str):
            cached_tokens = unpack_int32(batch.cached_tokens)[place]
            taken.stopped.append((request_id, answer, text, cached_tokens))
            continue
        num_characters += len(text)
        if answer.tokenizer != tokenizer:
            tokenizer = answer.tokenizer
            run = runs.setdefault(tokenizer, TogetherRows(batch))
        run.rows.append((place, token_id, text, text_offset))
    return taken
