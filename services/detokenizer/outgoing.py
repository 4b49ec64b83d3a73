"""Detokenizer process: what one batch gives, gathered row by row into columns.

One `TextChunks` per tokenizer process, and at most one `StopFound`, `DecodeFailed` and `Resend` for the scheduler: a
message costs much, a row in it little.
"""

from __future__ import annotations

from services.detokenizer.answer import AnswerChunk
from services.wire.columns import pack_int32, pack_request_ids
from services.wire.messages import DecodeFailed, Finish, Resend, StopFound, TextChunks

MAX_ROWS = 65_536  # of one TextChunks message
MAX_CHUNK_BYTES = 4 * 1024 * 1024  # where another message begins; a quarter of the largest frame


class ChunkColumns:
    """The rows for one tokenizer."""

    __slots__ = (
        "_attempts",
        "_cached_tokens",
        "_completion_tokens",
        "_counts",
        "_finishes",
        "_first_indexes",
        "_num_bytes",
        "_request_ids",
        "_text_offsets",
        "_texts",
        "_token_ids",
    )

    def __init__(self) -> None:
        self._request_ids: list[bytes] = []
        self._attempts: list[int] = []
        self._first_indexes: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []
        self._text_offsets: list[int] = []
        self._texts: list[str] = []
        self._finishes = bytearray()
        self._completion_tokens: list[int] = []
        self._cached_tokens: list[int] = []
        self._num_bytes = 0  # at most: four bytes a character

    @property
    def is_full(self) -> bool:
        """Whether the next row belongs into another message."""
        return self._num_bytes > MAX_CHUNK_BYTES or len(self._texts) == MAX_ROWS

    def add(self, request_id: bytes, attempt: int, chunk: AnswerChunk, cached_tokens: int) -> None:
        """One more row."""
        first_index, token_ids, text, text_offset, finish = chunk
        num_ids = len(token_ids)
        self._request_ids.append(request_id)
        self._attempts.append(attempt)
        self._first_indexes.append(first_index)
        self._counts.append(num_ids)
        self._token_ids.extend(token_ids)
        self._text_offsets.append(text_offset)
        self._texts.append(text)
        self._finishes.append(finish)
        self._completion_tokens.append(first_index + num_ids if finish is not Finish.NONE else 0)
        self._cached_tokens.append(cached_tokens)
        self._num_bytes += 4 * (num_ids + len(text))

    def message(self) -> TextChunks:
        """The rows as they travel."""
        return TextChunks(
            request_ids=pack_request_ids(self._request_ids),
            attempts=pack_int32(self._attempts),
            first_indexes=pack_int32(self._first_indexes),
            counts=pack_int32(self._counts),
            token_ids=pack_int32(self._token_ids),
            text_offsets=pack_int32(self._text_offsets),
            texts=tuple(self._texts),
            finishes=bytes(self._finishes),
            completion_tokens=pack_int32(self._completion_tokens),
            cached_tokens=pack_int32(self._cached_tokens),
        )


class Outgoing:
    """Everything to be sent after one batch."""

    def __init__(self) -> None:
        self._open_columns: dict[bytes, ChunkColumns] = {}
        self._full_columns: list[tuple[bytes, ChunkColumns]] = []
        self.stops_found: list[tuple[bytes, int, int]] = []  # request id, attempt, end index
        self.failures: list[tuple[bytes, int]] = []  # request id, attempt
        self.resends: list[tuple[bytes, int, int]] = []  # request id, attempt, first index

    def add_chunk(
        self, tokenizer: bytes, request_id: bytes, attempt: int, chunk: AnswerChunk, cached_tokens: int
    ) -> None:
        """A row for the tokenizer process of that identity."""
        columns = self._open_columns.get(tokenizer)
        if columns is None:
            columns = self._open_columns[tokenizer] = ChunkColumns()
        columns.add(request_id, attempt, chunk, cached_tokens)
        if columns.is_full:
            self._full_columns.append((tokenizer, self._open_columns.pop(tokenizer)))

    def for_tokenizers(self) -> list[tuple[bytes, TextChunks]]:
        """(identity, message) in the order in which they must be sent."""
        columns = [*self._full_columns, *self._open_columns.items()]
        return [(tokenizer, rows.message()) for tokenizer, rows in columns]

    def for_scheduler(self) -> list[StopFound | DecodeFailed | Resend]:
        """What the scheduler must hear, stops first: they free pages."""
        messages: list[StopFound | DecodeFailed | Resend] = []
        if self.stops_found:
            messages.append(StopFound(*_three_columns(self.stops_found)))
        if self.failures:
            request_ids, attempts = zip(*self.failures, strict=True)
            messages.append(DecodeFailed(pack_request_ids(request_ids), pack_int32(attempts)))
        if self.resends:
            messages.append(Resend(*_three_columns(self.resends)))
        return messages


def _three_columns(rows: list[tuple[bytes, int, int]]) -> tuple[bytes, bytes, bytes]:
    request_ids, attempts, indexes = zip(*rows, strict=True)
    return pack_request_ids(request_ids), pack_int32(attempts), pack_int32(indexes)
