"""Detokenizer process: every open answer, and what one batch of messages gives.

Pure: messages in, messages out; no socket and no clock. It owns one `AnswerDecoder` per open answer. There is no bound
on them here: the scheduler's admission bounds what is open, and evicting a live answer would end it wrongly. Answers
that have ended are remembered for a while (bounded), so that rows under way when an answer ended are recognised.

It must never let one answer's fault touch another: a row that raises ends its own answer with INTERNAL_ERROR.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from services.detokenizer.answer import AnswerChunk, AnswerDecoder, OpenAnswer
from services.detokenizer.incremental import TokenPieces
from services.detokenizer.outgoing import Outgoing
from services.detokenizer.together import advance_together, may_go_together
from services.detokenizer.turn_times import EndedAnswer, TurnTimes
from services.runtime.logs import about
from services.wire.answers import DecodeOpen, TokensProduced
from services.wire.columns import split_by_counts, unpack_int32, unpack_request_ids
from services.wire.finish import Finish
from services.wire.logprob_columns import LogprobRun, runs_of_rows

_Row: TypeAlias = tuple[int, list[int], Finish, LogprobRun | None]  # first index, ids, why it ends, log-probabilities
_BatchRow: TypeAlias = tuple[bytes, int, int, list[int], Finish, int, LogprobRun | None]
K = TypeVar("K")
V = TypeVar("V")
_log = logging.getLogger(__name__)
_finish_of = {int(finish): finish for finish in Finish}

MAX_ENDED_REMEMBERED = 16_384
MAX_UNKNOWN_REMEMBERED = 4_096
MAX_IDS_OF_A_CHUNK = 4_096
IDS_UNDER_WAY = 16  # how far past a stop string ids may come before the scheduler is told of it again
ROWS_BETWEEN_ASKS = 64  # a gap is asked for once, and again only if so many rows came without an answer


@dataclass(slots=True)
class Statistics:
    """Totals since the start."""

    num_tokens: int = 0
    num_old_rows: int = 0
    num_resends_asked: int = 0
    num_stops_found: int = 0
    num_failed: int = 0
    num_dropped_with_tokenizer: int = 0
    num_refused_messages: int = 0


class Decoders:
    """The table of open answers by request id."""

    def __init__(self, pieces: TokenPieces, goes_together: bool = True) -> None:
        """`goes_together`: whether plain rows are taken as columns; if not, one by one, to the same end."""
        self._goes_together = goes_together
        self._pieces = pieces
        self._open: dict[bytes, OpenAnswer] = {}
        self._ended: dict[bytes, tuple[int, int | None]] = {}  # attempt, end index if by a stop string
        self._unknown: dict[tuple[bytes, int], int] = {}  # (request id, attempt) -> rows since asked
        self._outgoing = Outgoing()
        self.statistics = Statistics()
        self.times = TurnTimes()

    @property
    def num_open(self) -> int:
        """Answers that have begun and not ended."""
        return len(self._open)

    def take_outgoing(self) -> Outgoing:
        """What the messages since the last call gave; the caller sends it."""
        outgoing, self._outgoing = self._outgoing, Outgoing()
        self.statistics.num_tokens += outgoing.num_tokens
        return outgoing

    def open(self, message: DecodeOpen, unix_s: float = 0.0) -> None:
        """Begins an answer at index 0, or begins it again (a replay); an older attempt than one seen is dropped.

        Args:
            message: which answer, and for whom.
            unix_s: the wall clock, for its report.
        """
        request_id, attempt = message.request_id, message.attempt
        known = self._open.get(request_id)
        ended = self._ended.get(request_id)
        if (known and known.attempt > attempt) or (ended and ended[0] > attempt):
            self.statistics.num_old_rows += 1
            return
        self._unknown.pop((request_id, attempt), None)
        try:
            decoder = AnswerDecoder(self._pieces, message.text)
        except Exception as error:
            ending = _ending_at(0, 0, Finish.INTERNAL_ERROR)
            self._fail(request_id, attempt, message.tokenizer, ending, error)
            return
        self._ended.pop(request_id, None)
        self._open[request_id] = OpenAnswer(attempt, message.tokenizer, decoder, unix_s, self.times.sums)

    def advance(self, batch: TokensProduced) -> None:
        """Feeds every row to its answer.

        Raises:
            ProtocolError: the columns do not fit together; no row was taken.
        """
        taken = self._advance_together(batch) if self._goes_together and may_go_together(batch) else None
        if taken is not None and all(taken):
            return
        counts = unpack_int32(batch.counts)
        rows: Iterable[_BatchRow] = zip(
            unpack_request_ids(batch.request_ids),
            unpack_int32(batch.attempts),
            unpack_int32(batch.first_indexes),
            split_by_counts(unpack_int32(batch.token_ids), counts),
            [_finish_of[value] for value in batch.finishes],
            unpack_int32(batch.cached_tokens),
            runs_of_rows(batch, counts),
            strict=True,
        )
        if taken is not None:
            rows = [row for row, is_taken in zip(rows, taken, strict=True) if not is_taken]
        for request_id, attempt, first_index, token_ids, finish, cached_tokens, logprobs in rows:
            answer = self._open.get(request_id)
            if answer is None or answer.attempt != attempt:
                self._take_stray(request_id, attempt, first_index)
            elif first_index > answer.decoder.next_index:
                self._ask_again(request_id, answer)
            elif len(token_ids) > MAX_IDS_OF_A_CHUNK:
                self._take_long_row(request_id, answer, (first_index, token_ids, finish, logprobs), cached_tokens)
            else:
                self._take_row(request_id, answer, (first_index, token_ids, finish, logprobs), cached_tokens)

    def _advance_together(self, batch: TokensProduced) -> bytearray:
        taken = advance_together(batch, self._open)
        for tokenizer, run in taken.runs.items():
            self._outgoing.add_rows(tokenizer, run)
        for request_id, answer, chunk, cached_tokens in taken.stopped:
            self._outgoing.add_chunk(answer.tokenizer, request_id, answer.attempt, chunk, cached_tokens)
            self._end(request_id, answer, chunk)
        for request_id, answer, text_offset, error in taken.failed:
            ending = _ending_at(answer.decoder.next_index, text_offset, Finish.INTERNAL_ERROR)
            self._fail(request_id, answer.attempt, answer.tokenizer, ending, error)
        return taken.is_taken

    def drop_tokenizers(self, gone: Set[bytes]) -> None:
        """Forgets the answers of these tokenizer processes: nobody can read them."""
        unread = [request_id for request_id, answer in self._open.items() if answer.tokenizer in gone]
        for request_id in unread:
            answer = self._open.pop(request_id)
            self._outgoing.failures.append((request_id, answer.attempt))
            self._remember_ended(request_id, answer.attempt, None)
        self.statistics.num_dropped_with_tokenizer += len(unread)

    def forget_all(self) -> None:
        """Begins anew, with nobody told: what was known came from a scheduler that is gone."""
        self._open.clear()
        self._ended.clear()
        self._unknown.clear()

    def end_all(self, finish: Finish) -> None:
        """Ends every open answer for a reason of this process, so that no client waits for it."""
        for request_id, answer in self._open.items():
            ending = _ending_at(answer.decoder.next_index, answer.decoder.text_offset, finish)
            self._outgoing.add_chunk(answer.tokenizer, request_id, answer.attempt, ending, 0)
            self._outgoing.failures.append((request_id, answer.attempt))
            self._remember_ended(request_id, answer.attempt, None)
        self._open.clear()

    def _take_long_row(self, request_id: bytes, answer: OpenAnswer, row: _Row, cached_tokens: int) -> None:
        """A replay, in pieces: a chunk must stay far below the limit of a frame."""
        first_index, token_ids, finish, logprobs = row
        for start in range(0, len(token_ids), MAX_IDS_OF_A_CHUNK):
            piece = token_ids[start : start + MAX_IDS_OF_A_CHUNK]
            is_last = start + len(piece) == len(token_ids)
            if self._open.get(request_id) is answer:
                piece_logprobs = logprobs and logprobs.cut(start, start + len(piece))
                piece_row = (first_index + start, piece, finish if is_last else Finish.NONE, piece_logprobs)
                self._take_row(request_id, answer, piece_row, cached_tokens)

    def _take_row(self, request_id: bytes, answer: OpenAnswer, row: _Row, cached_tokens: int) -> None:
        decoder = answer.decoder
        next_index, text_offset = decoder.next_index, decoder.text_offset
        first_index, token_ids, finish, logprobs = row
        try:
            chunk = decoder.advance(first_index, token_ids, finish)
        except Exception as error:
            ending = _ending_at(next_index, text_offset, Finish.INTERNAL_ERROR)
            self._fail(request_id, answer.attempt, answer.tokenizer, ending, error)
            return
        if chunk is None:
            self.statistics.num_old_rows += 1
            return
        if logprobs is not None and logprobs.num_entries:  # of the ids that are new and count
            num_known = chunk.first_index - first_index
            chunk.logprobs = logprobs.cut(num_known, num_known + len(chunk.token_ids))
        answer.num_chunks += 1
        self._outgoing.add_chunk(answer.tokenizer, request_id, answer.attempt, chunk, cached_tokens)
        if chunk.finish is not Finish.NONE:
            self._end(request_id, answer, chunk)

    def _end(self, request_id: bytes, answer: OpenAnswer, chunk: AnswerChunk) -> None:
        del self._open[request_id]
        end_index = None
        if chunk.finish is Finish.STOP_STRING:
            end_index = answer.decoder.next_index
            self._outgoing.stops_found[request_id, answer.attempt] = end_index
            self.statistics.num_stops_found += 1
        self._remember_ended(request_id, answer.attempt, end_index)
        self._outgoing.ended.append(
            EndedAnswer(
                answer.tokenizer,
                request_id,
                answer.attempt,
                answer.started_unix_s,
                answer.sums_at_start,
                answer.num_chunks,
                answer.decoder.next_index,
            )
        )

    def _take_stray(self, request_id: bytes, attempt: int, first_index: int) -> None:
        """A row of no open answer: an older attempt, one that has ended, or one never heard of."""
        known = self._open.get(request_id)
        ended_attempt, end_index = self._ended.get(request_id, (-1, None))
        if max(known.attempt if known else -1, ended_attempt) < attempt:
            self._ask_from_start(request_id, attempt)
            return
        self.statistics.num_old_rows += 1
        if attempt == ended_attempt and end_index is not None and first_index >= end_index + IDS_UNDER_WAY:
            self._outgoing.stops_found[request_id, attempt] = end_index  # the scheduler never heard of it

    def _ask_again(self, request_id: bytes, answer: OpenAnswer) -> None:
        next_index = answer.decoder.next_index
        answer.num_rows_since_ask += 1
        if answer.asked_index == next_index and answer.num_rows_since_ask < ROWS_BETWEEN_ASKS:
            return
        answer.asked_index, answer.num_rows_since_ask = next_index, 0
        self._outgoing.resends.append((request_id, answer.attempt, next_index))
        self.statistics.num_resends_asked += 1

    def _ask_from_start(self, request_id: bytes, attempt: int) -> None:
        num_rows = self._unknown.pop((request_id, attempt), 0)
        self._unknown[request_id, attempt] = (num_rows + 1) % ROWS_BETWEEN_ASKS
        _forget_oldest(self._unknown, MAX_UNKNOWN_REMEMBERED)
        if num_rows == 0:
            self._outgoing.resends.append((request_id, attempt, 0))
            self.statistics.num_resends_asked += 1

    def _fail(self, request_id: bytes, attempt: int, tokenizer: bytes, chunk: AnswerChunk, error: Exception) -> None:
        """This answer ends here, both sides are told, the others go on."""
        told = about(request_id)
        _log.error("attempt %d of %r could not be decoded", attempt, tokenizer, exc_info=error, extra=told)
        self._open.pop(request_id, None)
        self._outgoing.add_chunk(tokenizer, request_id, attempt, chunk, 0)
        self._outgoing.failures.append((request_id, attempt))
        self._remember_ended(request_id, attempt, None)
        self.statistics.num_failed += 1

    def _remember_ended(self, request_id: bytes, attempt: int, end_index: int | None) -> None:
        self._ended.pop(request_id, None)
        self._ended[request_id] = (attempt, end_index)
        _forget_oldest(self._ended, MAX_ENDED_REMEMBERED)


def _ending_at(next_index: int, text_offset: int, finish: Finish) -> AnswerChunk:
    return AnswerChunk(next_index, (), "", text_offset, finish)


def _forget_oldest(entries: dict[K, V], most: int) -> None:
    while len(entries) > most:
        del entries[next(iter(entries))]
