"""The bytes of token ids decode to what the tokenizers library decodes, for both families of vocabularies."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from transformers.models.llama.tokenization_llama import LlamaTokenizer

from services.model_files.errors import ModelFileError
from services.model_files.source import open_model
from services.model_files.tokenizer import LoadedTokenizer, load_tokenizer
from services.model_files.vocabulary import Vocabulary, load_vocabulary
from tests.unit.model_files.gguf_files import tokenizer_fields, write_gguf
from tests.unit.model_files.mixed_lines import mixed_lines
from tests.unit.model_files.trained_vocabularies import spell_bytes, train_sentencepiece


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LoadedTokenizer:
    return load_tokenizer(open_model(smollm2_path))


def _id(loaded: LoadedTokenizer, text: str) -> int:
    token_id = loaded.tokenizer.token_to_id(text)
    assert token_id is not None
    return token_id


def _decode(vocabulary: Vocabulary, ids: list[int], skip_special_tokens: bool = False) -> str:
    shown = (i for i in ids if not (skip_special_tokens and vocabulary.is_special(i)))
    return b"".join(vocabulary.token_bytes(i) for i in shown).decode("utf-8", errors="replace")


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_random_ids_decode_as_the_tokenizers_library_decodes(
    smollm2: LoadedTokenizer, skip_special_tokens: bool
) -> None:
    rng = random.Random(5)
    for _ in range(500):
        ids = [rng.choice([rng.randrange(49152), rng.randrange(300), rng.randrange(20)]) for _ in range(60)]
        expected = smollm2.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        assert _decode(smollm2.vocabulary, ids, skip_special_tokens) == expected, ids


def test_every_single_id_has_the_bytes_that_the_tokenizers_library_shows(smollm2: LoadedTokenizer) -> None:
    for token_id in range(smollm2.num_entries):
        expected = smollm2.tokenizer.decode([token_id], skip_special_tokens=False)
        assert _decode(smollm2.vocabulary, [token_id]) == expected


def test_numbers_of_the_demo_vocabulary(smollm2: LoadedTokenizer) -> None:
    vocabulary = smollm2.vocabulary
    assert (vocabulary.num_entries, vocabulary.max_token_bytes) == (49152, 81)
    assert vocabulary.end_token_ids == {2}
    assert vocabulary.special_token_ids == set(range(17))
    broken = [i for i in range(49152) if b"\xef\xbf\xbd" in _decode(vocabulary, [i]).encode()]
    assert len(broken) == 313 + 1  # 313 are no UTF-8 alone, one is U+FFFD itself


def test_det_01_split_characters_join(smollm2: LoadedTokenizer) -> None:
    cases = [[10813, 38887], [143, 233, 5415, 9150], [18645, 250, 48392, 138, 7906, 240, 178, 239, 230]]
    assert [_decode(smollm2.vocabulary, ids) for ids in cases] == ["🙂", "ďábel", "你好世界"]


def test_det_06_ids_without_an_entry_are_empty(smollm2: LoadedTokenizer) -> None:
    vocabulary = smollm2.vocabulary
    assert _decode(vocabulary, [19556, 49152, 905]) == "Hello world"
    assert _decode(vocabulary, [19556, 2147483647, -1, -49152]) == "Hello"
    assert not vocabulary.is_special(-1)
    assert not vocabulary.is_special(49152)


def test_det_06_padding_rows_of_a_gguf_are_no_entries(tmp_path: Path) -> None:
    tokens = [spell_bytes(bytes([byte])) for byte in range(256)] + ["<|end|>", "[PAD257]", "[PAD258]"]
    fields = tokenizer_fields(tokens, [1] * 256 + [3, 5, 5], "gpt2", "gpt-2", merges=["a b"], eos_token_id=256)
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.token_type does not match"):
        load_vocabulary(
            open_model(write_gguf(tmp_path / "odd.gguf", metadata=fields | {"tokenizer.ggml.tokens": [*tokens, "ab"]}))
        )
    vocabulary = load_vocabulary(open_model(write_gguf(tmp_path / "m.gguf", metadata=fields)))
    assert (vocabulary.num_entries, vocabulary.token_bytes(257)) == (257, b"")
    assert vocabulary.end_token_ids == {256}


def test_det_08_leading_space_stays(smollm2: LoadedTokenizer) -> None:
    assert smollm2.vocabulary.token_bytes(905) == b" world"


def test_det_09_special_tokens_are_shown_or_left_out(smollm2: LoadedTokenizer) -> None:
    ids = [19556, 2, 905]
    assert _decode(smollm2.vocabulary, ids, skip_special_tokens=True) == "Hello world"
    assert _decode(smollm2.vocabulary, ids, skip_special_tokens=False) == "Hello<|im_end|> world"


def _sentencepiece_folder(folder: Path) -> LoadedTokenizer:
    """A byte-fallback tokenizer.json as transformers saves it."""
    model = train_sentencepiece()
    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    tokenizer = LlamaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.save_pretrained(folder)
    config = {"model_type": "llama", "vocab_size": len(pieces) + 60, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return load_tokenizer(open_model(folder))


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_byte_fallback_ids_decode_as_the_library_decodes_but_keep_the_leading_space(
    tmp_path: Path, skip_special_tokens: bool
) -> None:
    loaded = _sentencepiece_folder(tmp_path)
    turn = _id(loaded, "<|turn|>")
    num_compared = 0
    for line in mixed_lines(400, seed=3):
        ids = loaded.tokenizer.encode(line).ids
        ids = [1, *ids[: len(ids) // 2], turn, *ids[len(ids) // 2 :], 2]
        text = _decode(loaded.vocabulary, ids, skip_special_tokens)
        if "�" not in text:  # a byte-fallback character cut by the special token
            num_compared += 1
            assert text.removeprefix(" ") == loaded.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    assert num_compared > 200


def test_byte_fallback_tokens_are_single_bytes_and_marks_are_spaces(tmp_path: Path) -> None:
    loaded = _sentencepiece_folder(tmp_path)
    vocabulary = loaded.vocabulary
    byte = _id(loaded, "<0xAB>")
    assert vocabulary.token_bytes(byte) == b"\xab"
    assert vocabulary.token_bytes(_id(loaded, "▁the")) == b" the"
    assert vocabulary.token_bytes(_id(loaded, "<|turn|>")) == b"<|turn|>"
    assert vocabulary.special_token_ids >= {0, 1, 2, _id(loaded, "<|turn|>")}
    ids = loaded.tokenizer.encode("𝔘", add_special_tokens=False).ids
    assert _decode(vocabulary, ids) == " 𝔘"


def _write_folder(folder: Path, tokenizer_json: object) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    return folder


@pytest.mark.parametrize(
    ("tokenizer_json", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, "field model: type 'WordPiece' is not supported"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}}, "decoder": {"type": "CTC"}}, "field decoder: CTC is not supp"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}}}, r"field model\.vocab: an id is not a number"),
        ({"model": {"type": "BPE", "vocab": {"a": 1 << 40}}, "decoder": {"type": "ByteLevel"}}, "too large"),
        ({"model": {"type": "BPE", "vocab": {}}, "added_tokens": [{"id": 1}]}, "field added_tokens: an entry has no c"),
        ([], r"tokenizer\.json: must hold a JSON object"),
    ],
)
def test_damaged_tokenizer_json_names_the_field(tmp_path: Path, tokenizer_json: object, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_vocabulary(open_model(_write_folder(tmp_path, tokenizer_json)))


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json"):
        load_vocabulary(open_model(tmp_path))
    with pytest.raises(ModelFileError, match=r"field tokenizer\.ggml\.tokens is missing"):
        load_vocabulary(open_model(write_gguf(tmp_path / "m.gguf")))
