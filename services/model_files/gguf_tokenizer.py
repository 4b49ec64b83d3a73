"""Builds a `tokenizers.Tokenizer` from GGUF metadata.

The file names the pre-tokenizer (`tokenizer.ggml.pre`) but does not describe it; the ones known here are those that
the checkpoints publish in tokenizer.json. A name that is not known stops the start: a near miss would give wrong ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.model_files.errors import ModelFileError
from services.model_files.gguf_metadata import GgufHeader
from services.model_files.tokenizer_config import GGUF_NORMAL, GGUF_UNUSED, gguf_tokens

_SPACE_MARK = "▁"

# Contractions, words with one leading sign, digits, signs, line ends, white space: the split known from tiktoken.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _ByteLevelKind:
    """One way to cut text into words before BPE.

    Attributes:
        split: The word pattern, None for GPT-2's own.
        single_digits: Cut around each digit first.
        nfc: Compose accents first.
        whole_words: A word that is a token stays whole even if no merge leads to it.
        adds_bos: What holds when the file does not say.
    """

    split: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_GPT2 = _ByteLevelKind()
_LLAMA3 = _ByteLevelKind(split=_WORDS + r"\p{N}{1,3}" + _REST, whole_words=True, adds_bos=True)
_KINDS = {
    "gpt-2": _GPT2,
    "smollm": _ByteLevelKind(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _ByteLevelKind(split=_WORDS + r"\p{N}" + _REST, nfc=True),
}


def tokenizer_from_gguf(header: GgufHeader) -> Tokenizer:
    """Build the tokenizer of this file, still without its added tokens and without BOS and EOS.

    Raises:
        ModelFileError: the tokenizer's kind is not known, or a field is missing or damaged.
    """
    model = header.text("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(header, _byte_level_kind(header))
    if model == "llama":
        return _sentencepiece(header)
    raise ModelFileError(
        header.path, f"field tokenizer.ggml.model: {model!r} is not supported (supported: gpt2, llama)"
    )


def gguf_adds_bos(header: GgufHeader) -> bool:
    """Return whether BOS goes before a raw prompt when the file does not say so itself."""
    if header.text("tokenizer.ggml.model") == "llama":
        return True
    return _byte_level_kind(header).adds_bos


def _byte_level_kind(header: GgufHeader) -> _ByteLevelKind:
    name = header.text("tokenizer.ggml.pre")
    if name not in _KINDS:
        known = ", ".join(_KINDS)
        raise ModelFileError(header.path, f"field tokenizer.ggml.pre: {name!r} is not supported (supported: {known})")
    return _KINDS[name]


def _byte_level(header: GgufHeader, kind: _ByteLevelKind) -> Tokenizer:
    adds_space = bool(header.flag("tokenizer.ggml.add_space_prefix"))
    if adds_space and kind != _GPT2:
        raise ModelFileError(header.path, "field tokenizer.ggml.add_space_prefix: only supported for gpt-2 and llama")
    merges = header.texts("tokenizer.ggml.merges")
    if merges is None:
        raise ModelFileError(header.path, "field tokenizer.ggml.merges is missing")
    vocab, _ = _vocab(header)
    tokenizer = _bpe(header, vocab, [_pair(header, merge) for merge in merges], ignore_merges=kind.whole_words)
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if kind.single_digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.split is not None:
        cuts.append(pre_tokenizers.Split(Regex(kind.split), behavior="isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=kind.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: GgufHeader) -> Tokenizer:
    """SentencePiece's BPE: the best scored neighbours join first, so a token's score ranks the merges that make it."""
    if header.flag("tokenizer.ggml.remove_extra_whitespaces"):
        raise ModelFileError(header.path, "field tokenizer.ggml.remove_extra_whitespaces: true is not supported")
    vocab, normal = _vocab(header)
    tokenizer = _bpe(header, vocab, _merges_by_score(header, vocab, normal), fuse_unk=True, byte_fallback=True)
    adds_space = header.flag("tokenizer.ggml.add_space_prefix") is not False
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE_MARK)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(header: GgufHeader, vocab: dict[str, int], normal: set[str]) -> list[tuple[str, str]]:
    scores = header.floats("tokenizer.ggml.scores")
    if scores is None or len(scores) <= max(vocab.values()):
        raise ModelFileError(
            header.path, "field tokenizer.ggml.scores is missing or shorter than tokenizer.ggml.tokens"
        )
    ranked = sorted(normal, key=lambda token: (-scores[vocab[token]], vocab[token]))
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]


def _vocab(header: GgufHeader) -> tuple[dict[str, int], set[str]]:
    """Return text -> id of every entry in use, and the texts of the ordinary ones among them."""
    tokens, kinds = gguf_tokens(header)
    used = [index for index, kind in enumerate(kinds) if kind != GGUF_UNUSED]
    return {tokens[index]: index for index in used}, {tokens[index] for index in used if kinds[index] == GGUF_NORMAL}


def _pair(header: GgufHeader, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or " " in right:
        raise ModelFileError(header.path, f"field tokenizer.ggml.merges: {merge!r} is not a pair")
    return left, right


def _bpe(header: GgufHeader, vocab: dict[str, int], merges: list[tuple[str, str]], **settings: bool) -> Tokenizer:
    unknown_id = header.integer("tokenizer.ggml.unknown_token_id")
    unknown = next((token for token, index in vocab.items() if index == unknown_id), None)
    try:
        # A byte-level vocabulary has no unknown text; naming a token would print it for a byte that is missing.
        unk_token = unknown if settings.get("byte_fallback") else None
        return Tokenizer(models.BPE(vocab, merges, unk_token=unk_token, **settings))
    except Exception as error:  # the library raises plain Exception for a vocabulary and merges that do not fit
        raise ModelFileError(header.path, f"field tokenizer.ggml.merges: {error}") from None
