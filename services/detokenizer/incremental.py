"""Detokenizer process: ids to text, one token at a time, byte-exact and linear in time.

A token is a run of bytes that may begin or end inside a character, so decoding each token alone would break characters,
and decoding everything again for each token would cost quadratic time. Here the bytes are the stream: each new token's
bytes follow at most three held ones, whole characters leave at once, and broken bytes leave as U+FFFD as soon as they
are known to be broken. The definition is Python's own incremental UTF-8 decoder with errors="replace":

    ids      10813        235            the bytes of a waving hand, split over two tokens
    bytes    f0 9f        91 8b
    text     (2 held)     U+1F44B

This module must never look at an id's meaning beyond its bytes, and must never hold more than three bytes.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from services.wire.errors import ProtocolError

MAX_HELD_BYTES = 3  # a character of four bytes that misses its last


class Vocabulary(Protocol):
    """What a model's token table must answer."""

    @property
    def num_entries(self) -> int:
        """Ids of [0, num_entries) may have bytes; ids above are padding of the logits."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; b"" for an id without an entry."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token controls the model instead of being text."""


class TokenPieces:
    """The bytes of every token in two lists, made once per process: special tokens shown, and skipped."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Reads the whole vocabulary (150,000 entries take about 0.1 s)."""
        ids = range(vocabulary.num_entries)
        self.shown = [vocabulary.token_bytes(token_id) for token_id in ids]
        self.special_skipped = [b"" if vocabulary.is_special(token_id) else self.shown[token_id] for token_id in ids]
        self.texts: dict[bytes, str] = {}
        """The texts of pieces that need no other for their characters; filled by decoders as they meet them."""

    def choose(self, skip_special_tokens: bool) -> list[bytes]:
        """The list for one answer; index by token id."""
        return self.special_skipped if skip_special_tokens else self.shown


class IncrementalDecoder:
    """The decoder of one answer. However the ids are cut into calls, the concatenated text is the same."""

    __slots__ = ("_held", "_pieces", "_texts")

    def __init__(self, pieces: list[bytes], texts: dict[bytes, str] | None = None) -> None:
        """`pieces[token_id]` is the token's bytes; ids beyond the list have none. `texts`: see `TokenPieces`."""
        self._pieces = pieces
        self._texts = {} if texts is None else texts
        self._held = b""

    @property
    def held_bytes(self) -> bytes:
        """The begun character that waits for its rest: at most MAX_HELD_BYTES bytes."""
        return self._held

    def decode(self, token_id: int) -> str:
        """The text that one more token completes: whole characters, or "".

        An id without an entry adds nothing. A negative id is the sender's fault: ProtocolError.
        """
        pieces = self._pieces
        if token_id >= len(pieces):
            return ""
        if token_id < 0:
            raise ProtocolError(f"negative token id {token_id}")
        piece, held = pieces[token_id], self._held
        if not held:
            known = self._texts.get(piece)
            if known is not None:  # nearly always
                return known
        stream = held + piece
        text, num_used = utf_8_decode(stream, "replace", False)
        self._held = stream[num_used:]
        if not held and not self._held:
            self._texts[piece] = text
        return text

    def decode_run(self, token_ids: Sequence[int]) -> str:
        """The same as `decode` of each id in turn, joined; one pass."""
        if token_ids and min(token_ids) < 0:
            raise ProtocolError(f"negative token id {min(token_ids)}")
        pieces = self._pieces
        num_pieces = len(pieces)
        stream = self._held + b"".join([pieces[i] for i in token_ids if i < num_pieces])
        text, num_used = utf_8_decode(stream, "replace", False)
        self._held = stream[num_used:]
        return text

    def flush(self) -> str:
        """The end: a character that was cut off becomes one U+FFFD."""
        text, _ = utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text
