"""Detokenizer process: one answer, from ids to chunks of text that a client may see.

Joins the incremental decoder and the stop matcher under the cursor rule: ids are taken exactly once and in order, so an
answer that is replayed from id 0 gives the same text at the same offsets.

    ids      [0      1      2      3      4)        half-open, counted from the first token after the prompt
    chunks   |--- a chunk ---|-- a chunk --|        its text may lag behind its ids: a begun character, a begun stop

This module must never hold anything that cannot be rebuilt from the ids and the answer's TextParams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.detokenizer.incremental import IncrementalDecoder, TokenPieces
from services.detokenizer.stop_strings import StopMatcher
from services.wire.errors import ProtocolError
from services.wire.finish import Finish
from services.wire.logprob_columns import LogprobRun
from services.wire.request_params import TextParams

_GOES_ON = Finish.NONE


@dataclass(slots=True)
class AnswerChunk:
    """What one advance gave: the ids taken, and the text that may be shown now.

    `text` starts at byte `text_offset` of the whole answer's UTF-8 text. A finish other than NONE ends the answer;
    `stop` is the stop string that did. `logprobs` are those of `token_ids`, when somebody asked for them.
    """

    first_index: int
    token_ids: Sequence[int]
    text: str
    text_offset: int
    finish: Finish
    stop: str = ""
    logprobs: LogprobRun | None = None


class AnswerDecoder:
    """The state of one open answer."""

    __slots__ = ("_decoder", "_matcher", "_min_tokens", "has_ended", "next_index", "text_offset")

    def __init__(self, pieces: TokenPieces, text: TextParams) -> None:
        """ValueError when a stop string is empty: the tokenizer service lets none through."""
        self._decoder = IncrementalDecoder(pieces.choose(text.skip_special_tokens), pieces.texts)
        self._matcher = StopMatcher(text.stop, text.include_stop_str_in_output) if text.stop else None
        self._min_tokens = text.min_tokens
        self.text_offset = 0
        self.has_ended = False
        self.next_index = 0

    def advance(self, first_index: int, token_ids: Sequence[int], finish: Finish = Finish.NONE) -> AnswerChunk | None:
        """Takes what continues the cursor and drops what is older.

        Args:
            first_index: index of `token_ids[0]`; at most `next_index` (the caller asks again for a gap).
            token_ids: may be empty when only the finish is new.
            finish: why the answer ends after these ids, or NONE. With STOP_TOKEN the last id adds no text.

        Returns:
            The chunk, or None when nothing was new. A stop string that completes at or before the end wins over
            `finish`: the chunk then has STOP_STRING and only the ids up to the one that completed it.

        Raises:
            ProtocolError: a negative id, ids after the end, a gap, or an end below the cursor: the scheduler's fault.
        """
        if first_index != self.next_index:
            token_ids = self._drop_known(self.next_index - first_index, token_ids, finish)
        if not token_ids and (finish is _GOES_ON or self.has_ended):
            return None
        if self.has_ended:
            raise ProtocolError("ids after the end of an answer")
        first_index, text_offset, matcher = self.next_index, self.text_offset, self._matcher
        if finish is _GOES_ON and len(token_ids) == 1:  # nearly every call
            text = self._decoder.decode(token_ids[0])
            self.next_index += 1
            if matcher is not None:
                text = matcher.feed(text, self.next_index >= self._min_tokens)
        else:
            text = self._decode(token_ids, finish)
        stop = ""
        if matcher is not None and matcher.found is not None:
            stop = matcher.found
            finish, token_ids = Finish.STOP_STRING, token_ids[: self.next_index - first_index]
        self.has_ended = finish is not _GOES_ON
        self.text_offset += len(text) if text.isascii() else len(text.encode())
        return AnswerChunk(first_index, token_ids, text, text_offset, finish, stop)

    def take_next(self, token_id: int) -> str | AnswerChunk:
        """The text that the id at the cursor completes: what `advance` with it alone gives, with nothing around it.

        The answer must not have ended. Where the id completes a stop string, the whole chunk: then it has.
        """
        text = self._decoder.decode(token_id)
        self.next_index += 1
        matcher = self._matcher
        if matcher is not None:
            text = matcher.feed(text, self.next_index >= self._min_tokens)
        text_offset = self.text_offset
        self.text_offset = text_offset + (len(text) if text.isascii() else len(text.encode()))
        if matcher is None or matcher.found is None:
            return text
        self.has_ended = True
        return AnswerChunk(self.next_index - 1, [token_id], text, text_offset, Finish.STOP_STRING, matcher.found)

    def _drop_known(self, num_known: int, token_ids: Sequence[int], finish: Finish) -> Sequence[int]:
        if num_known < 0:
            raise ProtocolError(f"{-num_known} ids are missing")
        if num_known > len(token_ids) and finish is not Finish.NONE:
            raise ProtocolError(f"an answer ends {num_known - len(token_ids)} ids below its cursor")
        return token_ids[num_known:]

    def _decode(self, token_ids: Sequence[int], finish: Finish) -> str:
        """The text to show; moves the cursor, to the end of the stop string if one is completed."""
        shown_ids = token_ids
        if finish is Finish.STOP_TOKEN:
            if not token_ids:
                raise ProtocolError("a stop token came before the finish that hides it")
            shown_ids = token_ids[:-1]
        if self._matcher is not None:
            return self._decode_and_match(self._matcher, shown_ids, len(token_ids) - len(shown_ids), finish)
        text = self._decoder.decode_run(shown_ids)
        self.next_index += len(token_ids)
        return text if finish is _GOES_ON else text + self._decoder.flush()

    def _decode_and_match(self, matcher: StopMatcher, shown_ids: Sequence[int], num_hidden: int, finish: Finish) -> str:
        shown: list[str] = []
        for token_id in shown_ids:
            text = self._decoder.decode(token_id)
            self.next_index += 1
            shown.append(matcher.feed(text, self.next_index >= self._min_tokens))
            if matcher.found is not None:
                return "".join(shown)
        self.next_index += num_hidden
        if finish is not _GOES_ON:
            shown.append(matcher.feed(self._decoder.flush(), self.next_index >= self._min_tokens))
            if matcher.found is None:
                shown.append(matcher.flush())
        return "".join(shown)


@dataclass(slots=True, eq=False)
class OpenAnswer:
    """An answer beside what is remembered of it: whose it is, its times, and what was asked for again."""

    attempt: int
    tokenizer: bytes
    decoder: AnswerDecoder
    started_unix_s: float
    sums_at_start: tuple[float, float]
    num_chunks: int = 0
    asked_index: int = -1
    num_rows_since_ask: int = 0
