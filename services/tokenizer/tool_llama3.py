"""Tokenizer process: calls as Llama 3 writes them: bare JSON, from the first character of the answer on.

    {"name": "f", "parameters": {...}}                       or after <|python_tag|>, wherever that stands
    {"name": "f", "parameters": {...}}; {"name": "g", ...}   several: one after the other, or with `;` or `,` between

Bare JSON elsewhere in an answer is text: an example that the user asked for looks the same.
"""

from __future__ import annotations

from services.tokenizer.tool_call_object import read_call_object
from services.tokenizer.tool_parts import AnswerParts
from services.tokenizer.tool_source import NotMarkupError, TextSource, Waiting, markup_or_text, text_until

TAG = "<|python_tag|>"


def read_llama3(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    """Reads a whole answer."""
    if (yield from source.skip_blanks()) == "{":
        yield from markup_or_text(source, parts, _calls(source, parts), has_tag=False)
    while (yield from text_until(source, parts.text, TAG)):
        yield from markup_or_text(source, parts, _calls(source, parts))


def _calls(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    yield from source.skip_blanks()
    yield from read_call_object(source, parts)
    while character := (yield from source.skip_blanks()):
        if character in ";,":
            source.take()
            character = yield from source.skip_blanks()
        if character != "{":
            break
        yield from read_call_object(source, parts)
    if not source.is_at_end:
        raise NotMarkupError  # what came after the last call is text
    source.commit()
