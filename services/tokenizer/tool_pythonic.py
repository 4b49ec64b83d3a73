"""Tokenizer process: calls written as a list of Python calls, from the first character of the answer on.

    [f(a=1, b="x"), g()]      or between <|python_start|> and <|python_end|>, wherever those stand

A call begins with its first argument's name, or with its end: `[f(x) for x in y]` is text.
"""

from __future__ import annotations

import json
import re

from services.tokenizer.tool_mistral import read_name
from services.tokenizer.tool_parts import AnswerParts
from services.tokenizer.tool_python import copy_literal
from services.tokenizer.tool_source import NotMarkupError, TextSource, Waiting, markup_or_text, text_until

TAG, END_TAG = "<|python_start|>", "<|python_end|>"
_IDENTIFIER = re.compile(r"[^\W\d]\w*")


def read_pythonic(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    """Reads a whole answer."""
    if (yield from source.skip_blanks()) == "[":
        yield from markup_or_text(source, parts, _list(source, parts), has_tag=False)
    while (yield from text_until(source, parts.text, TAG)):
        yield from markup_or_text(source, parts, _tagged(source, parts))


def _tagged(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    yield from source.skip_blanks()
    yield from _list(source, parts)
    yield from source.skip_blanks()
    if not (yield from source.take_word(END_TAG)) and not source.is_at_end:
        raise NotMarkupError
    source.commit()


def _list(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    yield from source.expect("[")
    yield from source.skip_blanks()
    yield from _call(source, parts)
    while (yield from source.skip_blanks()) == ",":
        source.take()
        if (yield from source.skip_blanks()) == "]":
            break
        yield from _call(source, parts)
    if not source.is_at_end:
        yield from source.expect("]")
    source.commit()


def _call(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    name = yield from read_name(source)
    if not parts.knows(name):
        raise NotMarkupError
    yield from source.skip_blanks()
    yield from source.expect("(")
    seen: set[str] = set()

    def give(fragment: str) -> None:
        parts.arguments(fragment)
        source.commit()

    while (yield from source.skip_blanks()) != ")":
        keyword = yield from _keyword(source)
        if keyword in seen:
            raise NotMarkupError
        if not seen:
            parts.start_call(name)
        give((", " if seen else "{") + json.dumps(keyword, ensure_ascii=False) + ": ")
        seen.add(keyword)
        yield from source.skip_blanks()
        yield from copy_literal(source, give)
        if (yield from source.skip_blanks()) == ",":
            source.take()
        elif (yield from source.peek()) != ")":
            raise NotMarkupError
    source.take()
    if not seen:
        parts.start_call(name)
    give("}" if seen else "{}")
    parts.end_arguments()
    parts.end_call()


def _keyword(source: TextSource) -> Waiting[str]:
    """Reads `name=`."""
    pieces: list[str] = []
    while (yield from source.peek()) not in ("=", " ", ""):
        pieces.append(source.take())
        if len(pieces) > 1024:
            raise NotMarkupError
    keyword = "".join(pieces)
    if not _IDENTIFIER.fullmatch(keyword):
        raise NotMarkupError
    yield from source.skip_blanks()
    yield from source.expect("=")
    return keyword
