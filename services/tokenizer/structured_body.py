"""Tokenizer process: the fields of a body that hold an answer to a grammar, in all the spellings that clients use.

They come in as decoded JSON; `structured_output` knows what each means.
"""

from __future__ import annotations

from typing import Any

from services.runtime.config import Settings
from services.tokenizer.api_error import bad_field
from services.tokenizer.sampling_body import SamplingBody
from services.tokenizer.structured_output import FIELDS, StructureLimits, structure_of, structure_param
from services.wire.request_params import Grammar


class StructuredBody(SamplingBody, frozen=True, kw_only=True):
    """How answers are drawn, and what they must be."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None

    def grammar(self, settings: Settings) -> Grammar | None:
        """What the answers must be sentences of; None for free text.

        Raises:
            ApiError: 400 naming the field; two that exclude each other.
        """
        asked = {name: value for name in FIELDS if (value := getattr(self, name)) is not None}
        grammar = structure_of(asked, StructureLimits.of(settings)) if asked else None
        check_beside_grammar(self, grammar)
        return grammar

    @property
    def grammar_param(self) -> str | None:
        """The place that the grammar came from; None for free text."""
        return structure_param({name: getattr(self, name) for name in FIELDS})


def check_beside_grammar(body: SamplingBody, grammar: Grammar | None) -> None:
    """What cannot be kept together with a grammar: no end, and bans that may leave nothing of what it allows.

    Raises:
        ApiError: 400 naming the field.
    """
    if grammar is None:
        return
    if body.ignore_eos:
        raise bad_field("ignore_eos", "cannot go together with a grammar: what it describes has an end")
    for name in ("allowed_token_ids", "bad_words"):
        if getattr(body, name):
            raise bad_field(name, "cannot go together with a grammar: there may be no token that both allow")
