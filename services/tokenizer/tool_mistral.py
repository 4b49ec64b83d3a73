"""Tokenizer process: calls as Mistral's models write them, before and since their eleventh tokenizer.

    [TOOL_CALLS] [{"name": "f", "arguments": {...}, "id": "..."}, ...]
    [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{...}

The words in brackets are special tokens: they are in the text only when special tokens are shown.
"""

from __future__ import annotations

import re

from services.tokenizer.tool_call_object import read_arguments, read_call_object
from services.tokenizer.tool_parts import AnswerParts
from services.tokenizer.tool_source import NotMarkupError, TextSource, Waiting, markup_or_text, text_until

OPENING, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME_RUN = re.compile(r"[A-Za-z0-9_.:-]+")
_MAX_NAME_CHARACTERS = 1024


def read_mistral(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    """Reads a whole answer."""
    while (yield from text_until(source, parts.text, OPENING)):
        yield from markup_or_text(source, parts, _calls(source, parts))


def _calls(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    first = yield from source.skip_blanks()
    if first == "[":
        yield from _list(source, parts)
    elif first == "{":
        yield from read_call_object(source, parts)
    else:
        yield from _named_call(source, parts)


def _list(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    source.take()
    yield from source.skip_blanks()
    yield from read_call_object(source, parts)
    while (yield from source.skip_blanks()) == ",":
        source.take()
        yield from source.skip_blanks()
        yield from read_call_object(source, parts)
    if not source.is_at_end:
        yield from source.expect("]")
    source.commit()


def _named_call(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    name = yield from read_name(source)
    if not parts.knows(name):
        raise NotMarkupError
    if (yield from source.skip_blanks()) == "[":
        source.take()
        if (yield from source.peek()) == CALL_ID[1]:
            yield from _word(source, CALL_ID[1:])
            yield from read_name(source)
            yield from source.expect("[")
        yield from _word(source, ARGUMENTS[1:])
        yield from source.skip_blanks()
    if (yield from source.peek()) != "{":
        raise NotMarkupError
    yield from read_arguments(source, parts, name)


def read_name(source: TextSource) -> Waiting[str]:
    """Reads the characters of a function's name; "" if there are none.

    Raises:
        NotMarkupError: more than any name has.
    """
    pieces: list[str] = []
    num_characters = 0
    while (yield from source.peek()):
        run = source.take_run(_NAME_RUN)
        if not run:
            break
        pieces.append(run)
        num_characters += len(run)
        if num_characters > _MAX_NAME_CHARACTERS:
            raise NotMarkupError
    return "".join(pieces)


def _word(source: TextSource, word: str) -> Waiting[None]:
    if not (yield from source.take_word(word)):
        raise NotMarkupError
