"""Tokenizer process: Python literals read while they come and given as JSON.

    {'a': True, "b": [1, None,]}  ->  {"a": true, "b": [1, null]}

Texts, numbers, True, False, None, lists and dicts with text keys; JSON's own words are taken too. Anything else
(tuples, sums, names) is no literal here. Owns nothing.
"""

from __future__ import annotations

import json
import re

from services.tokenizer.tool_json import Give
from services.tokenizer.tool_source import NotMarkupError, TextSource, Waiting

_WORD_RUN = re.compile(r"[-+.0-9A-Za-z_]+")
_NUMBER = re.compile(r"(?P<sign>[-+]?)(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?(?P<power>[eE][-+]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_STRING_RUNS = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"', "'": "'", "/": "/",
            "a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "\n": ""}  # fmt: skip
_NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def copy_literal(source: TextSource, give: Give) -> Waiting[None]:
    """Reads one literal and gives it as JSON.

    Raises:
        NotMarkupError: what comes is none; what was given before is the beginning of a JSON value.
    """
    open_brackets: list[str] = []
    while True:
        first = yield from source.peek()
        if first in _CLOSERS:
            give(source.take())
            if (yield from source.skip_blanks()) != _CLOSERS[first]:
                open_brackets.append(first)
                if first == "{":
                    yield from _copy_key(source, give)
                continue
            give(source.take())
        elif first in _STRING_RUNS:
            yield from _copy_string(source, give)
        else:
            yield from _copy_word(source, give)
        if not (yield from _closes_or_goes_on(source, give, open_brackets)):
            return


def _closes_or_goes_on(source: TextSource, give: Give, open_brackets: list[str]) -> Waiting[bool]:
    """After a value: closes the brackets that close here; whether another value of an open one follows."""
    while open_brackets:
        closer = _CLOSERS[open_brackets[-1]]
        character = yield from source.skip_blanks()
        has_comma = character == ","
        if has_comma:
            source.take()
            character = yield from source.skip_blanks()
        if character == closer:
            source.take()
            give(closer)
            open_brackets.pop()
        elif has_comma:
            give(", ")
            if closer == "}":
                yield from _copy_key(source, give)
            return True
        else:
            raise NotMarkupError
    return False


def _copy_key(source: TextSource, give: Give) -> Waiting[None]:
    if (yield from source.peek()) not in _STRING_RUNS:
        raise NotMarkupError
    yield from _copy_string(source, give)
    yield from source.skip_blanks()
    yield from source.expect(":")
    give(": ")
    yield from source.skip_blanks()


def _copy_string(source: TextSource, give: Give) -> Waiting[None]:
    quote = source.take()
    give('"')
    while (character := (yield from source.peek())) != quote:
        if run := source.take_run(_STRING_RUNS[quote]):
            give(json.dumps(run, ensure_ascii=False)[1:-1])
        elif character:
            give((yield from _escape(source)))
        else:
            raise NotMarkupError
    source.take()
    give('"')


def _escape(source: TextSource) -> Waiting[str]:
    """An escape that Python does not know is a backslash and a character, there as here."""
    source.take()
    kind = yield from source.peek()
    if kind in _ESCAPES:
        return _ESCAPES[source.take()]
    if kind not in _NUM_HEX_DIGITS:
        return "\\\\"
    source.take()
    number = int((yield from source.take_hex(_NUM_HEX_DIGITS[kind])), 16)
    if number > 0x10FFFF:
        raise NotMarkupError
    return json.dumps(chr(number))[1:-1]


def _copy_word(source: TextSource, give: Give) -> Waiting[None]:
    text = yield from source.take_runs(_WORD_RUN)
    give(_WORDS[text] if text in _WORDS else _number(text))


def _number(text: str) -> str:
    """A number as JSON writes it: no plus sign, digits on both sides of the point, no zeros in front."""
    found = _NUMBER.fullmatch(text)
    if found is None or not (found["whole"] or found["part"]):
        raise NotMarkupError
    whole, part, power = found["whole"] or "0", found["part"], found["power"] or ""
    is_integer = part is None and not power
    if is_integer and len(whole) > 1 and whole[0] == "0" and whole.strip("0"):
        raise NotMarkupError  # Python knows no such number
    fraction = "" if part is None else f".{part or '0'}"
    return f"{found['sign'].strip('+')}{whole.lstrip('0') or '0'}{fraction}{power}"
