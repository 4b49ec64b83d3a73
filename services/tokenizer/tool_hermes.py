r"""Tokenizer process: calls as Hermes, Qwen 2.5 and Qwen 3 write them.

    <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>      one block for each call

A block may hold several objects, and a missing end of the block is forgiven.
"""

from __future__ import annotations

from services.tokenizer.tool_call_object import read_call_object
from services.tokenizer.tool_parts import AnswerParts
from services.tokenizer.tool_source import NotMarkupError, TextSource, Waiting, markup_or_text, text_until

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def read_hermes(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    """Reads a whole answer."""
    while (yield from text_until(source, parts.text, OPENING)):
        yield from markup_or_text(source, parts, _block(source, parts))


def _block(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    yield from source.skip_blanks()
    yield from read_call_object(source, parts)
    while (yield from source.skip_blanks()) == "{":
        yield from read_call_object(source, parts)
    if not (yield from source.take_word(CLOSING)) and not source.is_at_end:
        raise NotMarkupError
    source.commit()
