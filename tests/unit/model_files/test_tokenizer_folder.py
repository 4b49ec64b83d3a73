"""Tokenizers from folders: ids, special tokens, BOS and end ids as transformers has them for the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from services.model_files.errors import ModelFileError
from services.model_files.source import open_model
from services.model_files.tokenizer import load_tokenizer
from tests.unit.model_files.gguf_files import tokenizer_fields, write_gguf
from tests.unit.model_files.mixed_lines import mixed_lines
from tests.unit.model_files.trained_vocabularies import spell_bytes, train_byte_level

_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-like model's folder as transformers saves it."""
    folder = tmp_path_factory.mktemp("published")
    vocab, merges = train_byte_level(r"\p{L}+|\p{N}|[^\p{L}\p{N}]", vocab_size=600)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    control = [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>", "<|mask|>")]
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<end>", rstrip=True, normalized=False)])
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": 7}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [8, 9], "top_k": 20}')
    return folder


def _changed(published: Path, folder: Path, **changes: object) -> Path:
    """Copy the folder with other entries in tokenizer_config.json; None removes an entry."""
    for path in published.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return folder


def test_ids_of_a_folder_equal_transformers(published: Path) -> None:
    reference = AutoTokenizer.from_pretrained(published)
    loaded = load_tokenizer(open_model(published))
    lines = mixed_lines(500, seed=4)
    lines += [f"{line[:9]}<|im_end|> \n<think>{line[9:]}<end>  \t x<|im_start|>" for line in lines[:200]]
    for line in lines:
        assert loaded.tokenizer.encode(line).ids == reference(line)["input_ids"], repr(line)


def test_stp_11_end_ids_are_the_union_of_config_generation_config_and_tokenizer(published: Path) -> None:
    loaded = load_tokenizer(open_model(published))
    im_end = loaded.tokenizer.token_to_id("<|im_end|>")
    assert loaded.end_token_ids == {7, 8, 9, im_end}


def test_stp_11_end_of_turn_of_the_template_ends_an_answer(published: Path, tmp_path: Path) -> None:
    folder = _changed(published, tmp_path, eos_token="<|endoftext|>")
    loaded = load_tokenizer(open_model(folder))
    ends = {loaded.tokenizer.token_to_id(text) for text in ("<|endoftext|>", "<|im_end|>")}
    assert loaded.end_token_ids == {7, 8, 9, *ends}
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "chat_template.jinja").unlink()
    assert loaded.tokenizer.token_to_id("<|im_end|>") not in load_tokenizer(open_model(folder)).end_token_ids


@pytest.mark.parametrize("single", [["B", "A"], ["A", "E"], ["B", "A", "E"], ["A"]])
@pytest.mark.parametrize("add_bos_token", [True, False, None])
def test_tok_01_bos_and_eos_of_raw_prompts_follow_tokenizer_json(
    published: Path, tmp_path: Path, single: list[str], add_bos_token: bool | None
) -> None:
    folder = _changed(published, tmp_path, add_bos_token=add_bos_token, bos_token="<|im_start|>")
    loaded = load_tokenizer(open_model(folder))
    bos, eos = loaded.bos_token_id, loaded.eos_token_id
    assert bos is not None
    assert eos is not None
    text = loaded.tokenizer.encode("Hi", add_special_tokens=False).ids
    processor = processors.TemplateProcessing(
        single=" ".join("$A" if part == "A" else part for part in single), special_tokens=[("B", bos), ("E", eos)]
    )
    loaded.tokenizer.post_processor = processor
    loaded.tokenizer.save(str(folder / "tokenizer.json"))
    expected = [token_id for part in single for token_id in {"B": [bos], "A": text, "E": [eos]}[part]]
    assert load_tokenizer(open_model(folder)).tokenizer.encode("Hi").ids == expected
    assert AutoTokenizer.from_pretrained(folder)("Hi")["input_ids"] == expected


def test_tokens_that_only_the_tokenizer_config_lists_are_known(published: Path, tmp_path: Path) -> None:
    """Older checkpoints have added tokens in tokenizer_config.json that tokenizer.json lacks."""
    folder = _changed(published, tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    lost = spec["added_tokens"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert load_tokenizer(open_model(folder)).tokenizer.token_to_id(lost["content"]) is None
    decoder = {str(lost["id"]): {key: value for key, value in lost.items() if key != "id"}}
    loaded = load_tokenizer(open_model(_changed(folder, folder, added_tokens_decoder=decoder)))
    assert loaded.tokenizer.encode(lost["content"]).ids == [lost["id"]]
    assert loaded.vocabulary.token_bytes(lost["id"]) == lost["content"].encode()
    decoder = {str(lost["id"] + 5): decoder[str(lost["id"])]}
    with pytest.raises(ModelFileError, match="does not get its id"):
        load_tokenizer(open_model(_changed(folder, folder, added_tokens_decoder=decoder)))


def test_control_tokens_are_the_special_ones_the_ends_and_those_that_look_like_it(published: Path) -> None:
    loaded = load_tokenizer(open_model(published))
    contents = {token.content for token in loaded.control_tokens}
    assert contents == {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"}
    assert loaded.special_texts["eos_token"] == "<|im_end|>"


def test_truncation_and_padding_of_the_file_are_switched_off(published: Path, tmp_path: Path) -> None:
    folder = _changed(published, tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert len(load_tokenizer(open_model(folder)).tokenizer.encode("one two three four").ids) > 2


def test_chat_templates_in_each_published_form(published: Path, tmp_path: Path) -> None:
    assert load_tokenizer(open_model(published)).chat_templates == {"default": _TEMPLATE}
    folder = _changed(published, tmp_path, chat_template="field")
    assert load_tokenizer(open_model(folder)).chat_templates == {"default": _TEMPLATE}, "the file wins"
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(open_model(folder)).chat_templates == {"default": "field"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("c")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(open_model(folder)).chat_templates == {"default": "a", "tool_use": "b", "rag": "c"}
    (folder / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: field chat_template is neither"):
        load_tokenizer(open_model(folder))


def test_tokenizer_json_that_the_library_refuses_is_named(published: Path, tmp_path: Path) -> None:
    folder = _changed(published, tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["merges"].append(["no", "such"])
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: is refused by the tokenizers library: "):
        load_tokenizer(open_model(folder))


_LETTERS = [spell_bytes(bytes([byte])) for byte in range(256)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "deepseek-llm"}, r"field tokenizer\.ggml\.pre: 'deepseek-llm' is not supported \(supported: gpt-2, "),
        ({"pre": None}, r"field tokenizer\.ggml\.pre: None is not supported"),
        ({"model": "bert"}, r"field tokenizer\.ggml\.model: 'bert' is not supported"),
        ({"pre": "qwen2", "merges": ["! !"], "add_space_prefix": True}, r"add_space_prefix: only supported for gpt-2"),
        ({"merges": ["ab"]}, r"field tokenizer\.ggml\.merges: 'ab' is not a pair"),
        ({"merges": ["a b"]}, r"field tokenizer\.ggml\.merges: "),
        ({"bos_token_id": 999}, r"field tokenizer\.ggml\.bos_token_id: 999 is not in the vocabulary"),
        ({"model": "llama"}, r"field tokenizer\.ggml\.scores is missing"),
    ],
)
def test_gguf_tokenizers_that_are_unknown_or_damaged_name_the_field(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    given: dict[str, object] = {"model": "gpt2", "pre": "gpt-2", **fields}
    pre = given.pop("pre")
    metadata = tokenizer_fields(
        _LETTERS, [1] * 256, str(given.pop("model")), None if pre is None else str(pre), **given
    )
    with pytest.raises(ModelFileError, match=message):
        load_tokenizer(open_model(write_gguf(tmp_path / "m.gguf", metadata=metadata)))


def test_gguf_token_types_become_special_and_plain_added_tokens(tmp_path: Path) -> None:
    metadata = tokenizer_fields(
        [*_LETTERS, "<|end|>", "<think>", "ab"], [1] * 256 + [3, 4, 1], "gpt2", "gpt-2",
        merges=["a b"], eos_token_id=256, add_space_prefix=True,
    )  # fmt: skip
    loaded = load_tokenizer(open_model(write_gguf(tmp_path / "m.gguf", metadata=metadata)))
    space = _LETTERS.index(spell_bytes(b" "))
    assert loaded.tokenizer.encode("ab<think>").ids == [space, 258, 257]
    assert loaded.tokenizer.encode(" ab<|end|>").ids == [space, 258, 256]
    assert loaded.tokenizer.decode([257, 256]) == "<think>"
    assert [token.content for token in loaded.control_tokens] == ["<|end|>"]
