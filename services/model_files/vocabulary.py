"""The bytes that each token id stands for: what the detokenizer needs, without the tokenizers library.

All texts lie in one bytes object with a table of offsets: two lookups a token, no object per entry. Joined bytes
decode to what the tokenizers library's `decode` gives, with these differences, each wanted:

- A SentencePiece decoder strips one leading space of the whole text; here it stays. A reply is a continuation of its
  prompt, and a decoder of single tokens would lose the space between words.
- Broken byte-fallback sequences: U+FFFD once for each maximal broken part, as Python does, not for each byte.
- An added token of a byte-level vocabulary stands for its content, also when that has letters of the byte alphabet.
- Never `clean_up_tokenization_spaces`: it changes text that the model wrote.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.model_files.errors import ModelFileError
from services.model_files.gguf_metadata import GgufHeader
from services.model_files.source import ModelFiles, read_json_object
from services.model_files.tokenizer_config import (
    GGUF_UNUSED,
    TokenizerConfig,
    gguf_tokens,
    tokenizer_config_of_folder,
    tokenizer_config_of_gguf,
    vocabulary_ids,
)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"
# Rows beyond this are no vocabulary but a damaged file.
_MAX_ENTRIES = 1 << 24


@dataclass(frozen=True)
class Vocabulary:
    """Token id -> bytes. Any int may be asked for: an id without an entry stands for no bytes and is not special.

    Attributes:
        num_entries: One more than the highest id with an entry; the model may have more rows of logits than that.
        max_token_bytes: The length of the longest token.
        special_token_ids: Control tokens: left out of text when `skip_special_tokens` is on.
        end_token_ids: Ids that end an answer.
    """

    num_entries: int
    max_token_bytes: int
    special_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    _texts: bytes = field(repr=False)
    _offsets: array[int] = field(repr=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; b"" for an id that has no entry (padding rows, out of range, negative)."""
        if not 0 <= token_id < self.num_entries:
            return b""
        return self._texts[self._offsets[token_id] : self._offsets[token_id + 1]]

    def is_special(self, token_id: int) -> bool:
        """Return whether the id is a control token."""
        return token_id in self.special_token_ids


def load_vocabulary(files: ModelFiles) -> Vocabulary:
    """Read the vocabulary from tokenizer.json or from GGUF metadata.

    Raises:
        ModelFileError: there is no tokenizer, or its kind is not supported; names the file and the field.
    """
    if files.gguf is not None:
        return _from_gguf(files, files.gguf)
    path = files.path / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(files.path, "has no tokenizer.json")
    tokenizer_json = read_json_object(path)
    config = tokenizer_config_of_folder(files, tokenizer_json)
    ids = vocabulary_ids(path, tokenizer_json)
    byte_level = _is_byte_level(path, tokenizer_json)
    to_bytes = _byte_level_bytes if byte_level else _sentencepiece_bytes
    texts = {token_id: to_bytes(token) for token, token_id in ids.items()}
    return _pack(path, texts, config, str.encode if byte_level else _sentencepiece_bytes)


def _from_gguf(files: ModelFiles, header: GgufHeader) -> Vocabulary:
    config = tokenizer_config_of_gguf(files, header)
    tokens, kinds = gguf_tokens(header)
    model = header.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelFileError(header.path, f"field tokenizer.ggml.model: {model!r} is not supported (gpt2, llama)")
    to_bytes = _byte_level_bytes if model == "gpt2" else _sentencepiece_bytes
    used = (index for index, kind in enumerate(kinds) if kind != GGUF_UNUSED)
    texts = {index: to_bytes(tokens[index]) for index in used}
    return _pack(header.path, texts, config, str.encode if model == "gpt2" else _sentencepiece_bytes)


def _pack(
    path: Path, texts: dict[int, bytes], config: TokenizerConfig, added_bytes: Callable[[str], bytes]
) -> Vocabulary:
    texts.update((token.token_id, added_bytes(token.content)) for token in config.added_tokens)
    num_entries = max(texts, default=-1) + 1
    if not 0 < num_entries <= _MAX_ENTRIES:
        raise ModelFileError(path, f"a vocabulary of {num_entries} entries is empty or too large")
    pieces = [texts.get(token_id, b"") for token_id in range(num_entries)]
    offsets = array("Q", [0])
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    return Vocabulary(
        num_entries=num_entries,
        max_token_bytes=max(map(len, pieces)),
        special_token_ids=frozenset(token.token_id for token in config.added_tokens if token.special),
        end_token_ids=config.end_token_ids,
        _texts=b"".join(pieces),
        _offsets=offsets,
    )


def _decoder_types(decoder: object) -> Iterable[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        nested = decoder.get("decoders")
        for inner in nested if isinstance(nested, list) else []:
            yield from _decoder_types(inner)


def _is_byte_level(path: Path, tokenizer_json: Mapping[str, object]) -> bool:
    kinds = set(_decoder_types(tokenizer_json.get("decoder")))
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    found = ", ".join(sorted(kinds)) or "none"
    raise ModelFileError(
        path, f"field decoder: {found} is not supported (supported: ByteLevel, ByteFallback, Metaspace)"
    )


def _byte_alphabet() -> dict[str, int]:
    """The letters that GPT-2 writes bytes with: printable Latin-1 as itself, the other 68 bytes from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_alphabet()
_LATIN1_OF_LETTER = str.maketrans({letter: chr(byte) for letter, byte in _BYTE_OF_LETTER.items()})
_IS_BYTE_LEVEL = re.compile("[" + "".join(re.escape(letter) for letter in _BYTE_OF_LETTER) + "]*")


def _byte_level_bytes(token: str) -> bytes:
    """One foreign letter makes the whole token plain text, as in the tokenizers library."""
    if _IS_BYTE_LEVEL.fullmatch(token):
        return token.translate(_LATIN1_OF_LETTER).encode("latin-1")
    return token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode("utf-8")
