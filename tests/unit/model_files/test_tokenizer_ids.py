"""Ids equal those of independent tokenizers on 2,000 lines of mixed text.

The other side never touches the code under test: transformers reads the files itself, tiktoken and sentencepiece are
the libraries that the models were trained with.
"""

from __future__ import annotations

import base64
import importlib.util
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from tokenizers import pre_tokenizers
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from services.model_files.source import open_model
from services.model_files.tokenizer import LoadedTokenizer, load_tokenizer
from tests.unit.model_files.gguf_files import tokenizer_fields, write_gguf
from tests.unit.model_files.mixed_lines import mixed_lines
from tests.unit.model_files.trained_vocabularies import spell_bytes, train_byte_level, train_sentencepiece

# The patterns as Meta (Llama 3) and Alibaba (Qwen) publish them with their tiktoken vocabularies.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_PATTERN = _LLAMA3_PATTERN.replace("{1,3}", "")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return mixed_lines(2000, seed=20)


def _assert_same_ids(loaded: LoadedTokenizer, lines: list[str], reference: Callable[[str], list[int]]) -> None:
    encodings = loaded.tokenizer.encode_batch_fast(lines, add_special_tokens=False)
    for line, encoding in zip(lines, encodings, strict=True):
        assert encoding.ids == reference(line), repr(line)


def _load_byte_level(path: Path, pre: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> LoadedTokenizer:
    tokens = sorted(vocab, key=vocab.__getitem__)
    fields = tokenizer_fields(
        [*tokens, "<|end|>"],
        [_NORMAL] * len(tokens) + [_CONTROL],
        "gpt2",
        pre,
        merges=[" ".join(pair) for pair in merges],
        eos_token_id=len(tokens),
    )
    return load_tokenizer(open_model(write_gguf(path, metadata=fields)))


def test_ids_of_the_demo_model_equal_transformers(smollm2_path: Path, lines: list[str]) -> None:
    """Transformers' GGUF reader leaves out the cut around digits that SmolLM2's tokenizer.json has; it is put back."""
    reference, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(smollm2_path))[:2])
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    loaded = load_tokenizer(open_model(smollm2_path))
    _assert_same_ids(loaded, lines, lambda line: list(reference.encode(line).ids))
    assert [loaded.tokenizer.encode(text).ids for text in ("", "Hi", "1, 2, 3, 4,")] == [
        [], [26843], [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28],
    ]  # fmt: skip


def test_the_demo_vocabulary_was_trained_with_digits_cut_out(smollm2_path: Path) -> None:
    """What the test above relies on: no token of the model joins a digit with anything."""
    vocabulary = load_tokenizer(open_model(smollm2_path)).vocabulary
    texts = [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.num_entries)]
    assert [text for text in texts if len(text) > 1 and any(byte in b"0123456789" for byte in text)] == []


def test_ids_with_pre_tokenizer_gpt2_equal_transformers(tmp_path: Path, lines: list[str]) -> None:
    vocab, merges = train_byte_level(None)
    reference = GPT2Tokenizer(vocab=vocab, merges=merges)
    loaded = _load_byte_level(tmp_path / "m.gguf", "gpt-2", vocab, merges)
    _assert_same_ids(loaded, lines, lambda line: list(reference(line)["input_ids"]))


def _tiktoken_ids(pattern: str, ranks: dict[bytes, int]) -> Callable[[str], list[int]]:
    encoding = tiktoken.Encoding("reference", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return encoding.encode_ordinary


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3"])
def test_ids_with_pre_tokenizer_llama3_equal_tiktoken(tmp_path: Path, lines: list[str], pre: str) -> None:
    vocab, merges = train_byte_level(_LLAMA3_PATTERN)
    letters = {letter: byte for byte in range(256) for letter in spell_bytes(bytes([byte]))}
    ranks = {bytes(letters[letter] for letter in token): token_id for token, token_id in vocab.items()}
    loaded = _load_byte_level(tmp_path / "m.gguf", pre, vocab, merges)
    _assert_same_ids(loaded, lines[:: 1 if pre == "llama-bpe" else 10], _tiktoken_ids(_LLAMA3_PATTERN, ranks))


def test_llama3_words_that_are_tokens_stay_whole_without_merges(tmp_path: Path) -> None:
    alphabet = {spell_bytes(bytes([byte])): byte for byte in range(256)}
    vocab, merges = alphabet | {"he": 256, "hello": 257}, [("h", "e")]
    whole = _load_byte_level(tmp_path / "a.gguf", "llama-bpe", vocab, merges).tokenizer
    merged = _load_byte_level(tmp_path / "b.gguf", "gpt-2", vocab, merges).tokenizer
    assert (whole.encode("hello", add_special_tokens=False).ids, merged.encode("hello").ids) == ([257], [256, *b"llo"])


def _qwen_ranks(num_ranks: int) -> dict[bytes, int]:
    """The first ranks of Qwen's own vocabulary; a BPE cut at a rank is a BPE."""
    spec = importlib.util.find_spec("dashscope")
    assert spec is not None, "install dashscope==2.0.2 with --no-deps (make does)"
    assert spec.submodule_search_locations is not None
    path = Path(next(iter(spec.submodule_search_locations))) / "resources" / "qwen.tiktoken"
    entries = (line.split() for line in path.read_bytes().splitlines()[:num_ranks])
    return {base64.b64decode(token): int(rank) for token, rank in entries}


def _merges_of_ranks(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """What joins last when a token is made from its bytes is the merge that the token stands for."""
    merges = []
    for token in ranks:
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda at: ranks.get(parts[at] + parts[at + 1], 1 << 30))
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append((spell_bytes(parts[0]), spell_bytes(parts[1])))
    return merges


def test_ids_with_pre_tokenizer_qwen2_equal_tiktoken_and_transformers(tmp_path: Path, lines: list[str]) -> None:
    ranks = _qwen_ranks(60_000)
    merges = _merges_of_ranks(ranks)
    vocab = {spell_bytes(token): rank for token, rank in ranks.items()}
    loaded = _load_byte_level(tmp_path / "m.gguf", "qwen2", vocab, merges)
    by_tiktoken = _tiktoken_ids(_QWEN_PATTERN, ranks)
    _assert_same_ids(loaded, lines, lambda line: by_tiktoken(unicodedata.normalize("NFC", line)))
    reference = Qwen2Tokenizer(vocab=vocab, merges=merges)
    _assert_same_ids(loaded, lines[::4], lambda line: list(reference(line)["input_ids"]))


def _load_sentencepiece(path: Path, model: sentencepiece.SentencePieceProcessor, **more: object) -> LoadedTokenizer:
    ids = range(model.get_piece_size())
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 4 if i == 3 else 1
        for i in ids
    ]
    fields = tokenizer_fields(
        [model.id_to_piece(i) for i in ids], kinds, "llama", "default",
        scores=[model.get_score(i) for i in ids], bos_token_id=1, eos_token_id=2, unknown_token_id=0, **more,
    )  # fmt: skip
    return load_tokenizer(open_model(write_gguf(path, metadata=fields)))


def test_ids_of_a_sentencepiece_gguf_equal_sentencepiece(tmp_path: Path, lines: list[str]) -> None:
    model = train_sentencepiece()
    assert model.id_to_piece(3) == "<tool>"
    loaded = _load_sentencepiece(tmp_path / "m.gguf", model)
    texts = [line.replace("\x00", "") for line in lines]
    _assert_same_ids(loaded, texts, model.encode)
    assert loaded.tokenizer.encode("你 x").ids == [1, *model.encode("你 x")], "such files add BOS unless they say no"
    without = _load_sentencepiece(tmp_path / "n.gguf", model, add_bos_token=False, add_eos_token=True)
    assert without.tokenizer.encode("x").ids == [*model.encode("x"), 2]


def test_gguf_without_space_prefix_does_not_add_one(tmp_path: Path) -> None:
    model = train_sentencepiece()
    loaded = _load_sentencepiece(tmp_path / "m.gguf", model, add_space_prefix=False, add_bos_token=False)
    prefixed = _load_sentencepiece(tmp_path / "n.gguf", model, add_bos_token=False)
    assert prefixed.tokenizer.encode("the").ids == model.encode("the")
    assert prefixed.tokenizer.encode("the").ids == loaded.tokenizer.encode(" the").ids
    assert loaded.tokenizer.encode("the").ids != loaded.tokenizer.encode(" the").ids
