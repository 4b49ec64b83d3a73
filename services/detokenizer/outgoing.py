"""Detokenizer process: what one batch gives, gathered row by row into columns.

One `TextChunks` per tokenizer process, and at most one `StopFound`, `DecodeFailed` and `Resend` for the scheduler: a
message costs much, a row in it little.
"""

from __future__ import annotations

from itertools import chain

from services.detokenizer.answer import AnswerChunk
from services.detokenizer.together import TogetherRows
from services.detokenizer.turn_times import EndedAnswer
from services.wire.answers import DecodeFailed, StopFound, TextChunks
from services.wire.columns import pack_int32, pack_request_ids
from services.wire.finish import Finish
from services.wire.joined_rows import joined_rows
from services.wire.logprob_columns import join_logprobs
from services.wire.requests import Resend

MAX_ROWS = 65_536  # of one TextChunks message
_ROW_BYTES = 64  # of one row, ids and text apart: MAX_ROWS of them are as many bytes as MAX_CHUNK_BYTES
MAX_CHUNK_BYTES = 4 * 1024 * 1024  # where another message begins; a quarter of the largest frame


class ChunkRows:
    """The rows for one tokenizer; they become columns when all are there, which is cheaper than ten appends a row."""

    __slots__ = ("_has_logprobs", "_rows", "most_bytes", "num_tokens")

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int, int, AnswerChunk]] = []
        self.most_bytes = 0
        """Of all columns, counting four bytes a character."""
        self._has_logprobs = False
        self.num_tokens = 0

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        """Whether the next row belongs into another message."""
        return self.most_bytes > MAX_CHUNK_BYTES or len(self._rows) == MAX_ROWS

    def add(self, request_id: bytes, attempt: int, cached_tokens: int, chunk: AnswerChunk) -> None:
        """One more row."""
        self._rows.append((request_id, attempt, cached_tokens, chunk))
        num_ids = len(chunk.token_ids)
        self.num_tokens += num_ids
        self.most_bytes += _ROW_BYTES + 4 * (num_ids + len(chunk.text))
        if chunk.logprobs is not None:
            self._has_logprobs = True
            self.most_bytes += 4 * num_ids + 8 * chunk.logprobs.num_entries

    def message(self) -> TextChunks:
        """The rows as they travel."""
        request_ids, attempts, cached_tokens, chunks = zip(*self._rows, strict=True)
        counts = [len(chunk.token_ids) for chunk in chunks]
        logprobs = (b"", b"", b"")
        if self._has_logprobs:
            logprobs = join_logprobs([chunk.logprobs for chunk in chunks], counts)
        return TextChunks(
            request_ids=pack_request_ids(request_ids),
            attempts=pack_int32(attempts),
            first_indexes=pack_int32([chunk.first_index for chunk in chunks]),
            counts=pack_int32(counts),
            token_ids=pack_int32(chain.from_iterable([chunk.token_ids for chunk in chunks])),
            text_offsets=pack_int32([chunk.text_offset for chunk in chunks]),
            texts=tuple([chunk.text for chunk in chunks]),
            finishes=bytes([chunk.finish for chunk in chunks]),
            completion_tokens=pack_int32(
                [chunk.first_index + len(chunk.token_ids) if chunk.finish else 0 for chunk in chunks]
            ),
            cached_tokens=pack_int32(cached_tokens),
            stops=tuple([chunk.stop for chunk in chunks if chunk.finish is Finish.STOP_STRING]),
            logprob_counts=logprobs[0],
            logprob_ids=logprobs[1],
            logprobs=logprobs[2],
        )


class Outgoing:
    """Everything to be sent after one batch."""

    def __init__(self) -> None:
        self._rows_of: dict[bytes, ChunkRows] = {}
        self._full: list[tuple[bytes, ChunkRows | TogetherRows]] = []
        self.stops_found: dict[tuple[bytes, int], int] = {}  # (request id, attempt) -> end index
        self.failures: list[tuple[bytes, int]] = []  # request id, attempt
        self.resends: list[tuple[bytes, int, int]] = []  # request id, attempt, first index
        self.ended: list[EndedAnswer] = []  # to be reported

    def add_chunk(
        self, tokenizer: bytes, request_id: bytes, attempt: int, chunk: AnswerChunk, cached_tokens: int
    ) -> None:
        """A row for the tokenizer process of that identity."""
        rows = self._rows_of.get(tokenizer)
        if rows is None:
            rows = self._rows_of[tokenizer] = ChunkRows()
        rows.add(request_id, attempt, cached_tokens, chunk)
        if rows.is_full:
            self._full.append((tokenizer, self._rows_of.pop(tokenizer)))

    def add_rows(self, tokenizer: bytes, rows: TogetherRows) -> None:
        """Rows that are a message of their own, behind what was added before."""
        if tokenizer in self._rows_of:
            self._full.append((tokenizer, self._rows_of.pop(tokenizer)))
        self._full.append((tokenizer, rows))

    @property
    def num_rows(self) -> int:
        """Chunks in all messages."""
        return sum(rows.num_rows for _, rows in self._all_rows())

    @property
    def num_tokens(self) -> int:
        """Ids in all chunks."""
        return sum(rows.num_tokens for _, rows in self._all_rows())

    def for_tokenizers(self) -> list[tuple[bytes, TextChunks]]:
        """(identity, message) in the order in which they must be sent."""
        messages: list[tuple[bytes, TextChunks]] = []
        parts_of: dict[bytes, list[TextChunks]] = {}
        num_bytes: dict[bytes, int] = {}
        for tokenizer, rows in self._all_rows():
            parts = parts_of.setdefault(tokenizer, [])
            if parts and num_bytes[tokenizer] + rows.most_bytes > MAX_CHUNK_BYTES:
                messages.append((tokenizer, joined_rows(parts)))
                parts.clear()
            num_bytes[tokenizer] = rows.most_bytes + (num_bytes[tokenizer] if parts else 0)
            parts.append(rows.message())
        return messages + [(tokenizer, joined_rows(parts)) for tokenizer, parts in parts_of.items()]

    def for_scheduler(self) -> list[StopFound | DecodeFailed | Resend]:
        """What the scheduler must hear, stops first: they free pages."""
        messages: list[StopFound | DecodeFailed | Resend] = []
        if self.stops_found:
            messages.append(
                StopFound(*_three_columns([(*key, end_index) for key, end_index in self.stops_found.items()]))
            )
        if self.failures:
            request_ids, attempts = zip(*self.failures, strict=True)
            messages.append(DecodeFailed(pack_request_ids(request_ids), pack_int32(attempts)))
        if self.resends:
            messages.append(Resend(*_three_columns(self.resends)))
        return messages

    def _all_rows(self) -> list[tuple[bytes, ChunkRows | TogetherRows]]:
        return [*self._full, *self._rows_of.items()]


def _three_columns(rows: list[tuple[bytes, int, int]]) -> tuple[bytes, bytes, bytes]:
    request_ids, attempts, indexes = zip(*rows, strict=True)
    return pack_request_ids(request_ids), pack_int32(attempts), pack_int32(indexes)
