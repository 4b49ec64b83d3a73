"""Tokenizer process: the model families whose calls can be read, by name and by what their chat templates say.

A family is where its parser, its grammar and the form of its call ids come together. The names are those that vLLM and
SGLang use. Pure.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from services.tokenizer.tool_hermes import read_hermes
from services.tokenizer.tool_llama3 import TAG, read_llama3
from services.tokenizer.tool_mistral import ARGUMENTS, CALL_ID, OPENING, read_mistral
from services.tokenizer.tool_parts import AnswerParts
from services.tokenizer.tool_pythonic import END_TAG, read_pythonic
from services.tokenizer.tool_pythonic import TAG as PYTHON_TAG
from services.tokenizer.tool_source import TextSource, Waiting

CallForm = Literal["hermes", "llama3", "mistral", "mistral_list", "pythonic"]
_ALPHANUMERICS = string.ascii_letters + string.digits


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_call_id() -> str:
    """Mistral's templates refuse any other length."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))


@dataclass(frozen=True)
class ToolFamily:
    """How a family writes calls.

    Attributes:
        form: What a grammar for calls has to look like.
        read: The parser's generator.
        marks: Words of the markup; those that are control tokens must be shown in the text.
        new_call_id: Draws an id.
    """

    form: CallForm
    read: Callable[[TextSource, AnswerParts], Waiting[None]]
    marks: tuple[str, ...]
    new_call_id: Callable[[], str] = _call_id


HERMES = ToolFamily("hermes", read_hermes, ("<tool_call>", "</tool_call>"))
LLAMA3 = ToolFamily("llama3", read_llama3, (TAG,))
MISTRAL = ToolFamily("mistral", read_mistral, (OPENING, ARGUMENTS, CALL_ID), _short_call_id)
MISTRAL_LIST = ToolFamily("mistral_list", read_mistral, (OPENING,), _short_call_id)
PYTHONIC = ToolFamily("pythonic", read_pythonic, (PYTHON_TAG, END_TAG))

FAMILIES = {
    "hermes": HERMES,
    "qwen25": HERMES,
    "qwen": HERMES,
    "llama3_json": LLAMA3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "llama4_pythonic": PYTHONIC,
}
TOOL_PARSERS = ("auto", "none", *FAMILIES)


def family_named(name: str, template: str) -> ToolFamily:
    """The family of one of FAMILIES' names; Mistral's form of a call is the template's."""
    family = FAMILIES[name]
    return MISTRAL_LIST if family is MISTRAL and ARGUMENTS not in template else family


def family_in(template: str) -> ToolFamily | None:
    """The family whose calls a chat template writes; None when it is none of these."""
    if OPENING in template:
        return family_named("mistral", template)
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return HERMES
    if PYTHON_TAG in template or "func_name1(" in template:
        return PYTHONIC
    if TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return LLAMA3
    return None
