"""Small vocabularies trained on the spot, and the spelling of bytes in byte-level ones."""

from __future__ import annotations

import io
import json

import sentencepiece
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.unit.model_files.mixed_lines import mixed_lines

BYTE_LETTERS: dict[int, str] = bytes_to_unicode()


def spell_bytes(raw: bytes) -> str:
    """Return bytes in the letters of byte-level vocabularies."""
    return "".join(BYTE_LETTERS[byte] for byte in raw)


def train_byte_level(pattern: str | None, vocab_size: int = 1500) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train a byte-level BPE with this word pattern (None for GPT-2's own); returns text -> id and the merges."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    cuts = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(mixed_lines(1500, seed=7), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def train_sentencepiece(vocab_size: int = 1200) -> sentencepiece.SentencePieceProcessor:
    """Train a BPE with byte fallback and a dummy prefix, as Llama 2 and Mistral have it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line.replace("\n", " ").replace("\x00", "") for line in mixed_lines(1500, seed=7)),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.98,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
