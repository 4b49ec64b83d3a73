"""What a model says about its tokenizer beside the vocabulary: special tokens, end ids, chat templates, BOS and EOS.

From tokenizer_config.json, chat_template.jinja and the `added_tokens` of tokenizer.json, or from GGUF metadata.
Used by the tokenizer (with the tokenizers library) and by the detokenizer (without it): both know the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.model_files.errors import ModelFileError
from services.model_files.gguf_metadata import GgufHeader
from services.model_files.source import ModelFiles, read_json_object, read_text

# token_type in GGUF. UNUSED entries are padding rows of the embedding matrix and stand for no text.
GGUF_NORMAL, GGUF_UNKNOWN, GGUF_CONTROL, GGUF_USER_DEFINED, GGUF_UNUSED = 1, 2, 3, 4, 5

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_GGUF_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# What ends a turn in the templates in use. Base models often name only the end of text as their end id, and then an
# answer in a chat would run on past its end.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in the text before the model's own splitting; `special` ones are control tokens."""

    token_id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer's facts that are no vocabulary.

    Attributes:
        added_tokens: All added tokens by ascending id.
        special_texts: The named special tokens that templates use: `bos_token`, `eos_token`, ... -> text.
        chat_templates: Template sources by name; the plain one is `default`. Empty if the model has none.
        adds_bos: Whether BOS goes before a raw prompt, if GGUF metadata says so. In a folder tokenizer.json alone
            decides: transformers reads no `add_bos_token` beside one either.
        adds_eos: Whether EOS goes after a raw prompt, likewise.
        bos_token_id: The id of the BOS token, None if there is none.
        eos_token_id: The tokenizer's own end id, None if there is none.
        end_token_ids: Every id that ends an answer: from config, generation_config, the tokenizer and its template.
    """

    added_tokens: tuple[AddedToken, ...]
    special_texts: dict[str, str]
    chat_templates: dict[str, str]
    adds_bos: bool | None
    adds_eos: bool | None
    bos_token_id: int | None
    eos_token_id: int | None
    end_token_ids: frozenset[int]


def tokenizer_config_of_folder(files: ModelFiles, tokenizer_json: Mapping[str, object]) -> TokenizerConfig:
    """Read tokenizer_config.json and the template files beside an already parsed tokenizer.json.

    Raises:
        ModelFileError: a file is damaged or a field has the wrong type.
    """
    path = files.path / "tokenizer_config.json"
    settings = read_json_object(path) if path.is_file() else {}
    texts = _named_texts(settings)
    added = _added_tokens(files.path / "tokenizer.json", tokenizer_json)
    _join_added_tokens_decoder(path, settings, added)
    ids = vocabulary_ids(files.path / "tokenizer.json", tokenizer_json)
    by_content = {token.content: token.token_id for token in added.values()}

    def find(content: str | None) -> int | None:
        return None if content is None else by_content.get(content, ids.get(content))

    for content in _special_contents(settings, texts):
        token_id = find(content)
        if token_id is not None and token_id not in added:
            added[token_id] = AddedToken(token_id, content, special=True)
    templates = _folder_templates(files.path, settings)
    return TokenizerConfig(
        added_tokens=tuple(sorted(added.values(), key=lambda token: token.token_id)),
        special_texts=texts,
        chat_templates=templates,
        adds_bos=None,
        adds_eos=None,
        bos_token_id=find(texts.get("bos_token")),
        eos_token_id=find(texts.get("eos_token")),
        end_token_ids=_end_token_ids(files, find(texts.get("eos_token")), templates, find),
    )


def tokenizer_config_of_gguf(files: ModelFiles, header: GgufHeader) -> TokenizerConfig:
    """Read the same facts from GGUF metadata.

    Raises:
        ModelFileError: the file holds no tokenizer or a field has the wrong type.
    """
    tokens, kinds = gguf_tokens(header)
    added = {
        index: AddedToken(index, tokens[index], special=kind != GGUF_USER_DEFINED)
        for index, kind in enumerate(kinds)
        if kind in (GGUF_UNKNOWN, GGUF_CONTROL, GGUF_USER_DEFINED)
    }
    texts: dict[str, str] = {}
    for name, key in _GGUF_NAMED_TOKENS.items():
        token_id = header.integer(f"tokenizer.ggml.{key}")
        if token_id is not None:
            if token_id >= len(tokens):
                raise ModelFileError(header.path, f"field tokenizer.ggml.{key}: {token_id} is not in the vocabulary")
            texts[name] = tokens[token_id]
    templates = _gguf_templates(header)
    by_content = {token.content: token.token_id for token in added.values()}
    eos_token_id = header.integer("tokenizer.ggml.eos_token_id")
    return TokenizerConfig(
        added_tokens=tuple(added.values()),
        special_texts=texts,
        chat_templates=templates,
        adds_bos=header.flag("tokenizer.ggml.add_bos_token"),
        adds_eos=header.flag("tokenizer.ggml.add_eos_token"),
        bos_token_id=header.integer("tokenizer.ggml.bos_token_id"),
        eos_token_id=eos_token_id,
        end_token_ids=_end_token_ids(files, eos_token_id, templates, by_content.get),
    )


def gguf_tokens(header: GgufHeader) -> tuple[list[str], list[int]]:
    """Return the token texts and their types, both [num_tokens].

    Raises:
        ModelFileError: either list is missing or their lengths differ.
    """
    tokens = header.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelFileError(header.path, "field tokenizer.ggml.tokens is missing or empty")
    kinds = header.integers("tokenizer.ggml.token_type")
    if kinds is None or len(kinds) != len(tokens):
        raise ModelFileError(header.path, "field tokenizer.ggml.token_type does not match tokenizer.ggml.tokens")
    return tokens, kinds


def vocabulary_ids(path: Path, tokenizer_json: Mapping[str, object]) -> dict[str, int]:
    """Return text -> id of the model's own vocabulary in a parsed tokenizer.json (BPE or Unigram).

    Raises:
        ModelFileError: the model is of another type, or its vocabulary is damaged.
    """
    model = tokenizer_json.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if kind in ("BPE", None) and isinstance(vocab, dict):
        if not all(type(token_id) is int and token_id >= 0 for token_id in vocab.values()):
            raise ModelFileError(path, "field model.vocab: an id is not a number from 0 up")
        return vocab
    if kind == "Unigram" and isinstance(vocab, list):
        if not all(isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in vocab):
            raise ModelFileError(path, "field model.vocab: an entry is not [text, score]")
        return {entry[0]: index for index, entry in enumerate(vocab)}
    raise ModelFileError(path, f"field model: type {kind!r} is not supported (supported: BPE, Unigram)")


def _added_tokens(path: Path, tokenizer_json: Mapping[str, object]) -> dict[int, AddedToken]:
    entries = tokenizer_json.get("added_tokens") or []
    if not isinstance(entries, list):
        raise ModelFileError(path, "field added_tokens is not a list")
    tokens = [_added_token(path, "added_tokens", entry, None) for entry in entries]
    return {token.token_id: token for token in tokens}


def _join_added_tokens_decoder(path: Path, settings: Mapping[str, object], added: dict[int, AddedToken]) -> None:
    """Add what only tokenizer_config.json lists: older checkpoints keep tokens there that tokenizer.json lacks."""
    entries = settings.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise ModelFileError(path, "field added_tokens_decoder is not an object")
    for key, entry in entries.items():
        token = _added_token(path, f"added_tokens_decoder.{key}", entry, key)
        added.setdefault(token.token_id, token)


def _added_token(path: Path, field: str, entry: object, key: str | None) -> AddedToken:
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise ModelFileError(path, f"field {field}: an entry has no content")
    token_id = entry.get("id") if key is None else int(key) if key.isdecimal() else None
    if type(token_id) is not int or token_id < 0:
        raise ModelFileError(path, f"field {field}: an entry's id is not a number from 0 up")
    flags = {name: bool(entry.get(name, False)) for name in ("special", "lstrip", "rstrip", "single_word")}
    normalized = bool(entry.get("normalized", not flags["special"]))
    return AddedToken(token_id, entry["content"], normalized=normalized, **flags)


def _token_text(value: object) -> str | None:
    """A special token is written as its text or as an object with the text under `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _named_texts(settings: Mapping[str, object]) -> dict[str, str]:
    texts = {name: _token_text(settings.get(name)) for name in _NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _special_contents(settings: Mapping[str, object], texts: Mapping[str, str]) -> Iterable[str]:
    yield from texts.values()
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key) or []
        for value in more.values() if isinstance(more, dict) else more if isinstance(more, list) else []:
            text = _token_text(value)
            if text is not None:
                yield text


def _folder_templates(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    templates: dict[str, str] = {}
    value = settings.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for entry in value:
            if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
                raise ModelFileError(folder / "tokenizer_config.json", "field chat_template: an entry has no template")
            templates[str(entry.get("name", "default"))] = entry["template"]
    elif value is not None:
        raise ModelFileError(folder / "tokenizer_config.json", "field chat_template is neither text nor a list")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[path.stem] = read_text(path)
    # The file is the newer form and wins over the field, as in transformers.
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = read_text(folder / "chat_template.jinja")
    return templates


def _gguf_templates(header: GgufHeader) -> dict[str, str]:
    templates: dict[str, str] = {}
    default = header.text("tokenizer.chat_template")
    if default is not None:
        templates["default"] = default
    for name in header.texts("tokenizer.chat_templates") or []:
        named = header.text(f"tokenizer.chat_template.{name}")
        if named is not None:
            templates[name] = named
    return templates


def _end_token_ids(
    files: ModelFiles,
    eos_token_id: int | None,
    templates: Mapping[str, str],
    find: Callable[[str], int | None],
) -> frozenset[int]:
    ids = set() if eos_token_id is None else {eos_token_id}
    for name, config in (("config", files.config), ("generation_config", files.generation_config)):
        value = config.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token_id) is not int or token_id < 0:
                raise ModelFileError(files.path, f"field eos_token_id of {name}: {token_id!r} is not a token id")
            ids.add(token_id)
    for text in _TURN_ENDS:
        found = find(text)
        if found is not None and any(text in template for template in templates.values()):
            ids.add(found)
    return frozenset(ids)
