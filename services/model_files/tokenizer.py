"""Loads a model's tokenizer: a `tokenizers.Tokenizer` from tokenizer.json or built from GGUF metadata.

Only the tokenizer service imports this module (and `gguf_tokenizer`): the other processes do without the library.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import Tokenizer, processors

from services.model_files.errors import ModelFileError
from services.model_files.gguf_metadata import GgufHeader
from services.model_files.gguf_tokenizer import gguf_adds_bos, tokenizer_from_gguf
from services.model_files.source import ModelFiles, read_json_object
from services.model_files.tokenizer_config import (
    AddedToken,
    TokenizerConfig,
    tokenizer_config_of_folder,
    tokenizer_config_of_gguf,
)
from services.model_files.vocabulary import Vocabulary, load_vocabulary


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer with what the service must know about it.

    Attributes:
        tokenizer: The library's object. With `add_special_tokens` it puts BOS and EOS as the model wants them.
        vocabulary: The bytes of each id, `num_entries`, `max_token_bytes`, `end_token_ids`.
        control_tokens: Tokens that only a template or a raw prompt may produce, by ascending id: all special ones, BOS,
            EOS and every end id, and any added token in the `<|name|>` spelling, which some checkpoints forget to mark.
        special_texts: `bos_token`, `eos_token`, ... -> text, as templates see them.
        chat_templates: Template sources by name, the plain one is `default`; empty if the model has none.
        bos_token_id: None if the model has no BOS.
        eos_token_id: The tokenizer's own end id; the ids that end an answer are `vocabulary.end_token_ids`.
    """

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    control_tokens: tuple[AddedToken, ...]
    special_texts: dict[str, str]
    chat_templates: dict[str, str]
    bos_token_id: int | None
    eos_token_id: int | None

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every id that ends an answer."""
        return self.vocabulary.end_token_ids

    @property
    def num_entries(self) -> int:
        """One more than the highest id with an entry."""
        return self.vocabulary.num_entries

    @property
    def max_token_bytes(self) -> int:
        """The length of the longest token: a text longer than context times this cannot fit."""
        return self.vocabulary.max_token_bytes


def load_tokenizer(files: ModelFiles) -> LoadedTokenizer:
    """Load the tokenizer of an opened model.

    Raises:
        ModelFileError: there is no tokenizer, or it is damaged or of an unsupported kind; names file and field.
    """
    vocabulary = load_vocabulary(files)
    if files.gguf is None:
        tokenizer, config = _from_folder(files)
    else:
        tokenizer, config = _from_gguf(files, files.gguf)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LoadedTokenizer(
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        control_tokens=_control_tokens(config),
        special_texts=config.special_texts,
        chat_templates=config.chat_templates,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )


def _from_folder(files: ModelFiles) -> tuple[Tokenizer, TokenizerConfig]:
    path = files.path / "tokenizer.json"
    spec = read_json_object(path)
    config = tokenizer_config_of_folder(files, spec)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(path, f"is refused by the tokenizers library: {error}") from None
    _add_tokens(files, tokenizer, config)
    return tokenizer, config


def _from_gguf(files: ModelFiles, header: GgufHeader) -> tuple[Tokenizer, TokenizerConfig]:
    config = tokenizer_config_of_gguf(files, header)
    tokenizer = tokenizer_from_gguf(header)
    _add_tokens(files, tokenizer, config)
    adds_bos = gguf_adds_bos(header) if config.adds_bos is None else config.adds_bos
    _set_ends(tokenizer, config, adds_bos, bool(config.adds_eos))
    return tokenizer, config


def _add_tokens(files: ModelFiles, tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    known = tokenizer.get_added_tokens_decoder()
    for token in config.added_tokens:
        present = known.get(token.token_id)
        if present is not None and present.content == token.content:
            continue
        added = tokenizers.AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )
        tokenizer.add_special_tokens([added]) if token.special else tokenizer.add_tokens([added])
        if tokenizer.token_to_id(token.content) != token.token_id:
            raise ModelFileError(files.path, f"added token {token.content!r} does not get its id {token.token_id}")


def _set_ends(tokenizer: Tokenizer, config: TokenizerConfig, adds_bos: bool, adds_eos: bool) -> None:
    """Make `add_special_tokens` put BOS before and EOS after a text, as far as the model has them."""
    bos, eos = config.special_texts.get("bos_token"), config.special_texts.get("eos_token")
    single, special_tokens = ["$A"], []
    if adds_bos and bos is not None and config.bos_token_id is not None:
        single.insert(0, bos)
        special_tokens.append((bos, config.bos_token_id))
    if adds_eos and eos is not None and config.eos_token_id is not None:
        single.append(eos)
        special_tokens.append((eos, config.eos_token_id))
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special_tokens)


def _control_tokens(config: TokenizerConfig) -> tuple[AddedToken, ...]:
    ends = {*config.end_token_ids, config.bos_token_id, config.eos_token_id}
    return tuple(
        token
        for token in config.added_tokens
        if token.special or token.token_id in ends or _looks_like_control(token.content)
    )


def _looks_like_control(content: str) -> bool:
    return content.startswith("<|") and content.endswith("|>")
