"""Tokenizer process: the texts of single tokens, as answers show them beside their probabilities. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from services.model_files.vocabulary import Vocabulary


class TokenTexts:
    """What the ids of a vocabulary look like to a client."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; b"" for an id without an entry."""
        return self._vocabulary.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """A token alone as text: U+FFFD where its bytes are no whole characters."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def exact(self, token_id: int) -> str:
        r"""The same, but bytes that are no whole characters are spelled out, as `bytes:\xf0\x9f`."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of many, control tokens spelled out."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", "replace")

    def shown_bytes(self, token_id: int, skips_special: bool) -> bytes:
        """What a token adds to an answer's text: nothing if it is a control token and these are left out."""
        return b"" if skips_special and self._vocabulary.is_special(token_id) else self.bytes_of(token_id)


def id_name(token_id: int) -> str:
    """An id in the place of its text."""
    return f"token_id:{token_id}"
