"""Which part of a prompt's text each token is. Pure.

A vocabulary spells a token in its own way: byte-level ones write bytes as letters (`Ġ` is a blank), others write `▁`.
Which way it is shows when the spellings, read so and joined, give the text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_pieces(text: str, spellings: Sequence[str]) -> list[str]:
    """The text cut at the tokens' boundaries, one piece for each token.

    A character whose bytes lie in several tokens is part of the last of them, and the others' pieces are shorter or
    empty. The pieces joined are the text; where no way of spelling gives it, they are the spellings as they are.
    """
    for to_bytes in (_from_byte_letters, _from_sentencepiece):
        pieces = _decoded([to_bytes(spelling) for spelling in spellings])
        joined = "".join(pieces)
        if joined == text:
            return pieces
        if joined == f" {text}":  # the blank that some tokenizers put before a text
            return [pieces[0].removeprefix(" "), *pieces[1:]]
    return list(spellings)


def _decoded(tokens: Sequence[bytes]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(token, index == len(tokens) - 1) for index, token in enumerate(tokens)]


def _byte_letters() -> dict[str, int]:
    """The letters that GPT-2 writes bytes with: printable Latin-1 as itself, the other 68 bytes from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES: dict[str, int] = _byte_letters()


def _from_byte_letters(spelling: str) -> bytes:
    if all(letter in _BYTES for letter in spelling):
        return bytes(_BYTES[letter] for letter in spelling)
    return spelling.encode()  # an added token is spelled as it is


def _from_sentencepiece(spelling: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(spelling)
    return bytes([int(byte[1], 16)]) if byte else spelling.replace("▁", " ").encode()
