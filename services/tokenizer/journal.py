"""Tokenizer process: the journal entry of one open answer, and the rule by which it grows.

An entry holds all that is needed to ask for the same answer again: prompt ids, parameters, seed (in its `Submit`), the
ids produced so far, how far its text has gone, the attempt. It takes chunks under the cursor rule:

    ids    [0 ......... next_index)      only what begins here or reaches beyond it is new
    text   [0 ... next_text_offset)      in bytes of UTF-8; may lag behind the ids

What lies below both cursors is old (a replay) and dropped; what begins above one is a gap, and nothing is taken. An end
by an error is taken wherever it stands: who lost a process cannot know how far its text went.
Pure: no clock, no socket.
"""

from __future__ import annotations

from typing import NamedTuple

from services.wire.columns import split_by_counts, unpack_int32, unpack_request_ids
from services.wire.errors import ProtocolError
from services.wire.messages import Finish, Submit, TextChunks

_FINISHES = tuple(Finish)
_BAD_ENDS = frozenset(Finish) - {Finish.NONE, Finish.STOP_TOKEN, Finish.LENGTH, Finish.STOP_STRING}


class ChunkRow(NamedTuple):
    """One row of `TextChunks`."""

    request_id: bytes
    attempt: int
    first_index: int
    token_ids: list[int]
    text_offset: int
    text: str
    finish: Finish
    completion_tokens: int
    cached_tokens: int


class GapError(Exception):
    """A chunk does not begin where the journal ends: what lies between was lost and must come again."""


def chunk_rows(chunks: TextChunks) -> list[ChunkRow]:
    """The rows of a message (the wire has checked that its columns fit together)."""
    rows = zip(
        unpack_request_ids(chunks.request_ids),
        unpack_int32(chunks.attempts),
        unpack_int32(chunks.first_indexes),
        split_by_counts(unpack_int32(chunks.token_ids), unpack_int32(chunks.counts)),
        unpack_int32(chunks.text_offsets),
        chunks.texts,
        [_FINISHES[value] for value in chunks.finishes],
        unpack_int32(chunks.completion_tokens),
        unpack_int32(chunks.cached_tokens),
        strict=True,
    )
    return [ChunkRow._make(row) for row in rows]


class JournalEntry:
    """One answer from Submit to its end."""

    __slots__ = (
        "attempt",
        "cached_tokens",
        "completion_tokens",
        "finish",
        "next_index",
        "next_text_offset",
        "output_token_ids",
        "submit",
    )

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.attempt = submit.attempt
        self.output_token_ids: list[int] = []
        self.next_index = 0
        self.next_text_offset = 0
        self.finish = Finish.NONE
        self.completion_tokens = 0
        """What usage reports; known at the end."""
        self.cached_tokens = 0

    @property
    def request_id(self) -> bytes:
        """The id that all messages about this answer carry."""
        return self.submit.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.submit.prompt_token_ids) // 4

    def take(self, row: ChunkRow) -> str | None:
        """Takes what is new in a row.

        Returns:
            The new text, "" when only ids or a finish were new; None when nothing was (an older row, another attempt,
            anything after the end).

        Raises:
            GapError: something before this row is missing; nothing was taken.
            ProtocolError: the row contradicts itself or what was taken before; nothing was taken.
        """
        _, attempt, first_index, token_ids, text_offset, text, finish, completion_tokens, cached_tokens = row
        if attempt != self.attempt or self.finish is not Finish.NONE:
            return None
        if first_index != self.next_index or text_offset != self.next_text_offset:
            token_ids, text = self._new_part(row)
        if finish is not Finish.NONE:
            self.finish = finish
            self.completion_tokens = completion_tokens
        elif not token_ids and not text:
            return None
        self.output_token_ids += token_ids
        self.next_index += len(token_ids)
        self.next_text_offset += len(text) if text.isascii() else len(text.encode())
        self.cached_tokens = cached_tokens
        return text

    def _new_part(self, row: ChunkRow) -> tuple[list[int], str]:
        """The ids and the text of a row that lie above the cursors."""
        num_known_ids = self.next_index - row.first_index
        num_known_bytes = self.next_text_offset - row.text_offset
        if num_known_ids < 0 or num_known_bytes < 0:
            if row.finish in _BAD_ENDS:
                return [], ""
            raise GapError
        if num_known_ids > len(row.token_ids) and row.finish is not Finish.NONE and row.finish not in _BAD_ENDS:
            raise ProtocolError(f"an answer ends {num_known_ids - len(row.token_ids)} ids below its cursor")
        try:
            text = row.text.encode()[num_known_bytes:].decode()
        except UnicodeDecodeError:
            raise ProtocolError("a replayed text differs from the one before") from None
        return row.token_ids[num_known_ids:], text
