"""Detokenizer process: one answer, from ids to chunks of text that a client may see.

Joins the incremental decoder and the stop matcher under the cursor rule: ids are taken exactly once and in order, so an
answer that is replayed from id 0 gives the same text at the same offsets.

    ids      [0      1      2      3      4)        half-open, counted from the first token after the prompt
    chunks   |--- a chunk ---|-- a chunk --|        its text may lag behind its ids: a begun character, a begun stop

This module must never hold anything that cannot be rebuilt from the ids and the answer's TextParams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.detokenizer.incremental import IncrementalDecoder, TokenPieces
from services.detokenizer.stop_strings import StopMatcher
from services.wire.errors import ProtocolError
from services.wire.messages import Finish, TextParams


class AnswerChunk(NamedTuple):
    """What one advance gave: the ids taken, and the text that may be shown now.

    `text` starts at byte `text_offset` of the whole answer's UTF-8 text. When `finish` is not NONE the answer has ended
    with `first_index + len(token_ids)` completion tokens.
    """

    first_index: int
    token_ids: Sequence[int]
    text: str
    text_offset: int
    finish: Finish


class AnswerDecoder:
    """The state of one open answer."""

    __slots__ = ("_decoder", "_has_ended", "_matcher", "_min_tokens", "next_index", "text_offset")

    def __init__(self, pieces: TokenPieces, text: TextParams) -> None:
        """ValueError when a stop string is empty: the tokenizer service lets none through."""
        self._decoder = IncrementalDecoder(pieces.choose(text.skip_special_tokens))
        self._matcher = StopMatcher(text.stop, text.include_stop_str_in_output) if text.stop else None
        self._min_tokens = text.min_tokens
        self.text_offset = 0
        self._has_ended = False
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
        num_known = self.next_index - first_index
        if num_known:
            token_ids = self._drop_known(num_known, token_ids, finish)
        if not token_ids and (finish is Finish.NONE or self._has_ended):
            return None
        self._require_sound(token_ids, finish)
        first_index = self.next_index
        text = self._decode(token_ids, finish)
        found = self._matcher is not None and self._matcher.found is not None
        if found:
            finish, token_ids = Finish.STOP_STRING, token_ids[: self.next_index - first_index]
        self._has_ended = finish is not Finish.NONE
        text_offset = self.text_offset
        self.text_offset += len(text) if text.isascii() else len(text.encode())
        return AnswerChunk(first_index, token_ids, text, text_offset, finish)

    def _drop_known(self, num_known: int, token_ids: Sequence[int], finish: Finish) -> Sequence[int]:
        if num_known < 0:
            raise ProtocolError(f"{-num_known} ids are missing")
        if num_known > len(token_ids) and finish is not Finish.NONE:
            raise ProtocolError(f"an answer ends {num_known - len(token_ids)} ids below its cursor")
        return token_ids[num_known:]

    def _require_sound(self, token_ids: Sequence[int], finish: Finish) -> None:
        if self._has_ended:
            raise ProtocolError("ids after the end of an answer")
        if token_ids and min(token_ids) < 0:
            raise ProtocolError(f"negative token id {min(token_ids)}")
        if not token_ids and finish is Finish.STOP_TOKEN:
            raise ProtocolError("a stop token came before the finish that hides it")

    def _decode(self, token_ids: Sequence[int], finish: Finish) -> str:
        """The text to show; moves the cursor, to the end of the stop string if one is completed."""
        if self._matcher is None:
            self.next_index += len(token_ids)
            shown_ids = token_ids[:-1] if finish is Finish.STOP_TOKEN else token_ids
            text = self._decoder.decode(shown_ids[0]) if len(shown_ids) == 1 else self._decoder.decode_run(shown_ids)
            return text if finish is Finish.NONE else text + self._decoder.flush()
        return self._decode_and_match(self._matcher, token_ids, finish)

    def _decode_and_match(self, matcher: StopMatcher, token_ids: Sequence[int], finish: Finish) -> str:
        shown: list[str] = []
        last_index = self.next_index + len(token_ids) - 1
        for token_id in token_ids:
            adds_text = finish is not Finish.STOP_TOKEN or self.next_index != last_index
            self.next_index += 1
            text = self._decoder.decode(token_id) if adds_text else ""
            if text:
                shown.append(matcher.feed(text, self.next_index >= self._min_tokens))
                if matcher.found is not None:
                    return "".join(shown)
        if finish is not Finish.NONE:
            shown.append(matcher.feed(self._decoder.flush(), self.next_index >= self._min_tokens))
            if matcher.found is None:
                shown.append(matcher.flush())
        return "".join(shown)
