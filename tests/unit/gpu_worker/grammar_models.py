"""Small vocabularies for tests of grammars."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from services.model_files.vocabulary import Vocabulary

END, OTHER_END, SPECIAL, EMPTY = 256, 257, 258, 259
"""Ids of `byte_vocabulary` behind the bytes: two that end an answer, a control token, one without an entry."""


def vocabulary(tokens: Sequence[bytes], specials: Sequence[int], ends: Sequence[int]) -> Vocabulary:
    """A vocabulary of these tokens."""
    offsets = array("Q", [0])
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return Vocabulary(
        num_entries=len(tokens),
        max_token_bytes=max(map(len, tokens)),
        special_token_ids=frozenset(specials),
        end_token_ids=frozenset(ends),
        _texts=b"".join(tokens),
        _offsets=offsets,
    )


def byte_vocabulary(extra: Sequence[bytes] = ()) -> Vocabulary:
    """Every byte as a token with its own number, the ids above, and some longer tokens (256 + 4 and up)."""
    named = [b"</s>", b"<|eot|>", b"<|tool|>", b""]
    return vocabulary([bytes([byte]) for byte in range(256)] + named + list(extra), [END, SPECIAL], [END, OTHER_END])
