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

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple, TypeAlias, cast

from services.tokenizer.answer_parts import TokenLogprobs
from services.tokenizer.prompt_pieces import PromptPieces
from services.tokenizer.token_logprobs import token_logprobs
from services.wire.answers import TextChunks
from services.wire.columns import split_by_counts, unpack_int32, unpack_request_ids
from services.wire.errors import ProtocolError
from services.wire.finish import Finish
from services.wire.request_params import PLAIN_PROMPT
from services.wire.requests import Submit

_FINISHES = tuple(Finish)
_BAD_ENDS = frozenset(Finish) - {Finish.NONE, Finish.STOP_TOKEN, Finish.LENGTH, Finish.STOP_STRING}


class ChunkRow(NamedTuple):
    """One row of `TextChunks`."""

    request_id: bytes
    attempt: int
    first_index: int
    token_ids: Sequence[int]
    text_offset: int
    text: str
    finish: Finish
    completion_tokens: int
    cached_tokens: int
    logprobs: Sequence[TokenLogprobs]
    stop: str


class NewPart(NamedTuple):
    """What of a row was new: text, ids, and one `TokenLogprobs` an id if the request asked for them."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]


AnswerNews: TypeAlias = ChunkRow | NewPart
"""What was added to an answer; a row itself where all of it is new."""


class Ending(NamedTuple):
    """How an answer ended: `stop` is the stop string or the id that ended it, None for its length."""

    finish: Finish
    stop: str | int | None = None
    embedding: bytes = b""
    cached_tokens: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether the model would have gone on: a limit or a stop string ended it."""
        return self.finish in (Finish.LENGTH, Finish.STOP_STRING)


class GapError(Exception):
    """A chunk does not begin where the journal ends: what lies between was lost and must come again."""


_new_row = cast(Callable[[tuple[object, ...]], ChunkRow], partial(tuple.__new__, ChunkRow))
"""What `ChunkRow._make` does, of tuples that have its length; one is made for each token."""


def chunk_rows(chunks: TextChunks) -> list[ChunkRow]:
    """The rows of a message (the wire has checked that its columns fit together)."""
    counts = unpack_int32(chunks.counts)
    finishes = [_FINISHES[value] for value in chunks.finishes]
    stops, no_stops = iter(chunks.stops), repeat("", len(counts))
    rows = zip(
        unpack_request_ids(chunks.request_ids),
        unpack_int32(chunks.attempts),
        unpack_int32(chunks.first_indexes),
        split_by_counts(unpack_int32(chunks.token_ids), counts),
        unpack_int32(chunks.text_offsets),
        chunks.texts,
        finishes,
        unpack_int32(chunks.completion_tokens),
        unpack_int32(chunks.cached_tokens),
        _logprobs_of(chunks, counts),
        [next(stops) if finish is Finish.STOP_STRING else "" for finish in finishes] if chunks.stops else no_stops,
        strict=True,
    )
    return list(map(_new_row, rows))


def _logprobs_of(chunks: TextChunks, counts: list[int]) -> Iterable[Sequence[TokenLogprobs]]:
    """The log-probabilities of each row; () for rows that did not ask for any."""
    if not chunks.logprob_counts:
        return repeat((), len(counts))
    tokens = token_logprobs(chunks.logprob_counts, chunks.logprob_ids, chunks.logprobs)
    rows: list[Sequence[TokenLogprobs]] = []
    start = 0
    for count in counts:
        rows.append([token for token in tokens[start : start + count] if token is not None])
        start += count
    return rows


class JournalEntry:
    """One answer from Submit to its end."""

    __slots__ = (
        "attempt",
        "cached_tokens",
        "completion_tokens",
        "finish",
        "first_token_s",
        "last_token_s",
        "next_index",
        "next_text_offset",
        "output_token_ids",
        "pieces",
        "stop",
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
        self.pieces = None if submit.prompt == PLAIN_PROMPT else PromptPieces(submit)
        """What was asked of the prompt itself; siblings share those of the first answer."""
        self.stop = ""
        """The stop string that ended it."""
        self.first_token_s = 0.0
        """When its first token came in; 0 as long as none has."""
        self.last_token_s = 0.0

    @property
    def request_id(self) -> bytes:
        """The id that all messages about this answer carry."""
        return self.submit.request_id

    @property
    def misses_pieces(self) -> bool:
        """Whether something of the prompt is still to come: the answer cannot end before it is there."""
        return self.pieces is not None and not self.pieces.are_complete

    @property
    def ending(self) -> Ending:
        """How it ended, once it has."""
        stop: str | int | None = None
        if self.finish is Finish.STOP_STRING:
            stop = self.stop
        elif self.finish is Finish.STOP_TOKEN:
            stop = self.output_token_ids[-1]
        embedding = b"" if self.pieces is None else self.pieces.embedding
        return Ending(self.finish, stop, embedding, self.cached_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.submit.prompt_token_ids) // 4

    def take(self, row: ChunkRow) -> AnswerNews | None:
        """Takes what is new in a row.

        Returns:
            What was new, perhaps only a finish; None when nothing was (an older row, another attempt, anything after
            the end).

        Raises:
            GapError: something before this row is missing; nothing was taken.
            ProtocolError: the row contradicts itself or what was taken before; nothing was taken.
        """
        _, attempt, first_index, token_ids, text_offset, text, finish, num_tokens, num_cached, logprobs, stop = row
        if attempt != self.attempt or self.finish is not Finish.NONE:
            return None
        if logprobs and len(logprobs) != len(token_ids):
            raise ProtocolError(f"{len(logprobs)} log-probabilities for {len(token_ids)} ids")
        news: AnswerNews = row
        if first_index != self.next_index or text_offset != self.next_text_offset:
            news = self._new_part(row)
            text, token_ids, _ = news
        if finish is not Finish.NONE:
            self.finish = finish
            self.stop = stop
            self.completion_tokens = num_tokens
        elif not token_ids and not text:
            return None
        self.output_token_ids += token_ids
        self.next_index += len(token_ids)
        self.next_text_offset += len(text) if text.isascii() else len(text.encode())
        self.cached_tokens = num_cached
        return news

    def _new_part(self, row: ChunkRow) -> NewPart:
        """What of a row lies above the cursors."""
        num_known_ids = self.next_index - row.first_index
        num_known_bytes = self.next_text_offset - row.text_offset
        if num_known_ids < 0 or num_known_bytes < 0:
            if row.finish in _BAD_ENDS:
                return NewPart("", (), ())
            raise GapError
        if num_known_ids > len(row.token_ids) and row.finish is not Finish.NONE and row.finish not in _BAD_ENDS:
            raise ProtocolError(f"an answer ends {num_known_ids - len(row.token_ids)} ids below its cursor")
        try:
            text = row.text.encode()[num_known_bytes:].decode()
        except UnicodeDecodeError:
            raise ProtocolError("a replayed text differs from the one before") from None
        return NewPart(text, row.token_ids[num_known_ids:], row.logprobs[num_known_ids:])
