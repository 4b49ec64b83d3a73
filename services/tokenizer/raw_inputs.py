"""Tokenizer process: raw prompts as OpenAI's routes and the one for scores take them: texts, or token ids. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from msgspec import Meta

from services.tokenizer.api_error import bad_field
from services.tokenizer.sampling_body import TokenId

TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
RawInput: TypeAlias = str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
"""A text, a list of texts, a list of token ids, or a list of such lists."""


def inputs_of(value: str | Sequence[str | int | list[int]], param: str) -> Sequence[str | list[int]]:
    """The prompts in the order given: all texts or all ids.

    Raises:
        ApiError: 400 naming the field: none, an empty one, or a mixture.
    """
    items = [value] if isinstance(value, str) else value
    if not items:
        raise bad_field(param, "must not be empty")
    ids = [item for item in items if isinstance(item, int)]
    if len(ids) == len(items):
        return [ids]
    texts = [item for item in items if isinstance(item, str)]
    id_lists = [item for item in items if isinstance(item, list)]
    if len(items) not in (len(texts), len(id_lists)):
        raise bad_field(param, "must be a text, a list of texts, a list of token ids or a list of such lists")
    for index, item in enumerate(items):
        if not item:
            raise bad_field(param if isinstance(value, str) else f"{param}[{index}]", "must not be empty")
    return texts or id_lists
