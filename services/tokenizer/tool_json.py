"""Tokenizer process: JSON values read while they come, checked character by character.

What is given is valid JSON as far as it goes: a value that breaks off or breaks the rules is noticed at the character
that does. One thing is mended that models do and parsers refuse: a raw line break or tab inside a string is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from services.tokenizer.tool_parts import BLANKS
from services.tokenizer.tool_source import NotMarkupError, TextSource, Waiting

Give = Callable[[str], None]

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_CLOSERS = {"{": "}", "[": "]"}


def copy_value(source: TextSource, give: Give) -> Waiting[None]:
    """Reads one value and gives its text, white space as written.

    Raises:
        NotMarkupError: what comes is no JSON value; what was given before is the beginning of one.
    """
    open_brackets: list[str] = []
    while True:
        first = yield from source.peek()
        if first in _CLOSERS:
            give(source.take())
            if (yield from _copy_blanks(source, give)) != _CLOSERS[first]:
                open_brackets.append(first)
                if first == "{":
                    yield from _copy_key(source, give)
                continue
            give(source.take())
        elif first == '"':
            yield from copy_string(source, give)
        else:
            yield from _copy_scalar(source, give)
        if not (yield from _closes_or_goes_on(source, give, open_brackets)):
            return


def copy_string(source: TextSource, give: Give) -> Waiting[None]:
    """Reads one string and gives its text, quotes and all.

    Raises:
        NotMarkupError: no string, or not a legal one.
    """
    yield from source.expect('"')
    give('"')
    while True:
        character = yield from source.peek()
        if run := source.take_run(_STRING_RUN):
            give(run)
        elif character == '"':
            give(source.take())
            return
        elif character == "\\":
            give((yield from _escape(source)))
        elif character:
            give(json.dumps(source.take())[1:-1])
        else:
            raise NotMarkupError


def read_string(source: TextSource, max_characters: int) -> Waiting[str]:
    """Reads one string; what it says.

    Raises:
        NotMarkupError: no string, not a legal one, or one that is longer as written.
    """
    pieces: list[str] = []
    num_characters = 0

    def collect(piece: str) -> None:
        nonlocal num_characters
        num_characters += len(piece)
        if num_characters > max_characters + 2:
            raise NotMarkupError
        pieces.append(piece)

    yield from copy_string(source, collect)
    text: str = json.loads("".join(pieces))
    return text


def ignore(_: str) -> None:
    """Gives nothing on."""


def _closes_or_goes_on(source: TextSource, give: Give, open_brackets: list[str]) -> Waiting[bool]:
    """After a value: closes the brackets that close here; whether another value of an open one follows."""
    while open_brackets:
        character = yield from _copy_blanks(source, give)
        if character == _CLOSERS[open_brackets[-1]]:
            give(source.take())
            open_brackets.pop()
        elif character == ",":
            give(source.take())
            yield from _copy_blanks(source, give)
            if open_brackets[-1] == "{":
                yield from _copy_key(source, give)
            return True
        else:
            raise NotMarkupError
    return False


def _copy_key(source: TextSource, give: Give) -> Waiting[None]:
    yield from copy_string(source, give)
    yield from _copy_blanks(source, give)
    yield from source.expect(":")
    give(":")
    yield from _copy_blanks(source, give)


def _copy_blanks(source: TextSource, give: Give) -> Waiting[str]:
    while (character := (yield from source.peek())) and character in BLANKS:
        give(source.take())
    return character


def _copy_scalar(source: TextSource, give: Give) -> Waiting[None]:
    """A number or a word: known to be whole only when something else follows."""
    text = yield from source.take_runs(_SCALAR_RUN)
    if not _SCALAR.fullmatch(text):
        raise NotMarkupError
    give(text)


def _escape(source: TextSource) -> Waiting[str]:
    source.take()
    kind = yield from source.peek()
    if kind and kind in '"\\/bfnrt':
        return "\\" + source.take()
    yield from source.expect("u")
    return "\\u" + (yield from source.take_hex(4))
