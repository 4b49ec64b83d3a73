"""gpu_worker and its grammar child: the model's vocabulary as the grammar library sees it.

Where a grammar leaves one way to go on, the library wants to know how the model would write those bytes: `encode`, by
the rule of byte-pair encoding that the token made first is joined first. In the vocabularies that are served (byte
level, or SentencePiece) tokens are numbered in the order in which they were made, so their ids are all that it takes.
A test holds it against the models' own tokenizers. Where it differs, the text is still the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLTokenizer

from services.model_files.vocabulary import Vocabulary

_PIECE = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]{1,64}| ?\d{1,16}| ?(?:[^\w\s]|_){1,64}|\s{1,64}(?!\S)|\s{1,64}")
_MAX_CACHED_PIECES = 32768


class ForcedText:
    """The vocabulary in the form that `LLTokenizer` reads: `tokens`, `special_token_ids`, and a call that encodes."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, vocabulary: Vocabulary, width: int) -> None:
        """`width`: how many ids the model's logits have; those without an entry stand for nothing."""
        ends = [token_id for token_id in sorted(vocabulary.end_token_ids) if token_id < width]
        specials = {token_id for token_id in vocabulary.special_token_ids if token_id < width}
        self.eos_token_id = ends[0] if ends else width - 1
        self.end_token_ids: Sequence[int] = ends or [self.eos_token_id]
        self.special_token_ids: Sequence[int] = sorted(specials.union(self.end_token_ids))
        self.tokens: Sequence[bytes] = [vocabulary.token_bytes(token_id) for token_id in range(width)]
        # Of two ids with the same bytes the later: in SentencePiece the first is the spare one for a single byte.
        hidden = set(self.special_token_ids)
        self._ids = {text: token_id for token_id, text in enumerate(self.tokens) if text and token_id not in hidden}
        self._is_byte_level = any(len(text) == 2 and _is_cut(text) for text in self._ids)
        self._encode_piece = lru_cache(_MAX_CACHED_PIECES)(self._merge)

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text, up to the first byte that no id stands for (a vocabulary can lack some)."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="ignore")
        token_ids: list[int] = []
        for piece in _PIECE.findall(text):
            for token_id in self._encode_piece(piece):
                if token_id is None:
                    return token_ids
                token_ids.append(token_id)
        return token_ids

    def _merge(self, piece: str) -> tuple[int | None, ...]:
        """Joins neighbours until none can be: always the pair whose token has the lowest id, the leftmost of equals.

        None stands for a byte that no id stands for.
        """
        parts = [part for char in piece for part in self._char_parts(char)]
        while len(parts) > 1:
            pairs = [self._ids.get(left + right) for left, right in itertools.pairwise(parts)]
            made = [token_id for token_id in pairs if token_id is not None]
            if not made:
                break
            place = pairs.index(min(made))
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return tuple(self._ids.get(part) for part in parts)

    def _char_parts(self, char: str) -> list[bytes]:
        """What joining begins with: bytes in a byte-level vocabulary, else a character that is a token."""
        whole = char.encode()
        if not self._is_byte_level and whole in self._ids:
            return [whole]
        return [whole[index : index + 1] for index in range(len(whole))]


def _is_cut(text: bytes) -> bool:
    """Whether two bytes are the beginning of a longer character: only byte-level vocabularies have such tokens."""
    return text[0] >= 0xE0 and 0x80 <= text[1] <= 0xBF


def library_tokenizer(vocabulary: Vocabulary, width: int) -> LLTokenizer:
    """The vocabulary for the library: the model's end ids end a sentence, other special ids are never allowed.

    Args:
        vocabulary: of the model.
        width: how many ids its logits have.
    """
    forced = ForcedText(vocabulary, width)
    return LLTokenizer(forced, eos_token=list(forced.end_token_ids))  # type: ignore[arg-type]  # its form, not its class
