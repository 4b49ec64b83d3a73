"""Tokenizer process: a call written as a JSON object, as several model families do.

    {"name": "f", "arguments": {...}}      in any order; `parameters` is the same; all other keys are passed by

A call begins when its name is known and its arguments begin. Until then all of it may still be text: a function that
the request does not declare, broken JSON, other keys and no arguments at all. Of a call that is cut off by the end of
the answer the name is enough. Owns nothing beyond the call that it reads.
"""

from __future__ import annotations

import json
from typing import NoReturn

from services.tokenizer.tool_json import copy_string, copy_value, ignore, read_string
from services.tokenizer.tool_parts import AnswerParts
from services.tokenizer.tool_source import NotMarkupError, TextSource, Waiting

_MAX_NAME_CHARACTERS = 1024
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS_OF_CALLS = ("id", "type")  # those that models write beside a name without arguments


def read_call_object(source: TextSource, parts: AnswerParts) -> Waiting[None]:
    """Reads the object and gives the call.

    Raises:
        NotMarkupError: it is none, or breaks the rules of JSON on the way.
    """
    call = _Call(source, parts)
    try:
        yield from _read_members(source, call)
    except NotMarkupError:
        if not (source.is_at_end and call.can_be_cut_off):
            raise
        call.cut_off()
    else:
        call.end()


def read_arguments(source: TextSource, parts: AnswerParts, name: str) -> Waiting[None]:
    """Reads an object of arguments that follows the name, and gives the call.

    Raises:
        NotMarkupError: it is none, or breaks the rules of JSON on the way.
    """
    call = _Call(source, parts)
    call.name = name
    yield from call.read_member("arguments")
    call.end()


def _read_members(source: TextSource, call: _Call) -> Waiting[None]:
    yield from source.expect("{")
    character = ","
    while character == ",":
        yield from source.skip_blanks()
        key = yield from _read_key(source)
        yield from source.skip_blanks()
        yield from source.expect(":")
        yield from source.skip_blanks()
        yield from call.read_member(key)
        character = yield from source.skip_blanks()
        if character == ",":
            source.take()
    yield from source.expect("}")


def _read_key(source: TextSource) -> Waiting[str]:
    """Reads a key; "" for one that is too long to be one that is looked for."""
    pieces: list[str] = []
    num_characters = 0

    def collect(piece: str) -> None:
        nonlocal num_characters
        num_characters += len(piece)
        if num_characters <= _MAX_NAME_CHARACTERS:
            pieces.append(piece)

    yield from copy_string(source, collect)
    key: str = json.loads("".join(pieces)) if num_characters <= _MAX_NAME_CHARACTERS else ""
    return key


class _Call:
    def __init__(self, source: TextSource, parts: AnswerParts) -> None:
        self._source = source
        self._parts = parts
        self.name: str | None = None
        self._early: list[str] = []
        self._has_arguments = False
        self._has_other_keys = False
        self._has_started = False

    def read_member(self, key: str) -> Waiting[None]:
        if key == "name" and self.name is None:
            name = yield from read_string(self._source, _MAX_NAME_CHARACTERS)
            if not self._parts.knows(name):
                raise NotMarkupError
            self.name = name
        elif key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            yield from self._read_arguments()
        else:
            self._has_other_keys |= key not in _KEYS_OF_CALLS
            yield from copy_value(self._source, ignore)

    @property
    def can_be_cut_off(self) -> bool:
        """Whether nothing of the call was given yet although it is known to be one."""
        return self.name is not None and not self._has_started

    def cut_off(self) -> None:
        """The answer has ended before the arguments."""
        assert self.name is not None
        self._start(self.name)
        self._parts.arguments("".join(self._early))
        self._source.commit()
        self._parts.end_call()

    def end(self) -> None:
        """The object is closed."""
        if self.name is None or (self._has_other_keys and not self._has_arguments):
            raise NotMarkupError
        if not self._has_started:
            self._start(self.name)
            self._parts.arguments("".join(self._early) or "{}")
        self._source.commit()
        self._parts.end_call()

    def _read_arguments(self) -> Waiting[None]:
        first = yield from self._source.peek()
        if first == "{":
            if self.name is not None:
                self._start(self.name)
                self._source.commit()
            yield from copy_value(self._source, self._give)
            if self._has_started:
                self._parts.end_arguments()
        elif first == '"':
            pieces: list[str] = []
            yield from copy_string(self._source, pieces.append)
            self._early.append(_object_text("".join(pieces)))
        else:
            word: list[str] = []
            yield from copy_value(self._source, word.append)
            if word != ["null"]:
                raise NotMarkupError

    def _start(self, name: str) -> None:
        self._has_started = True
        self._parts.start_call(name)

    def _give(self, fragment: str) -> None:
        if self._has_started:
            self._parts.arguments(fragment)
            self._source.commit()
        else:
            self._early.append(fragment)


def _object_text(quoted: str) -> str:
    """Arguments that are written as JSON within a string, as some models do."""
    text: str = json.loads(quoted)
    try:
        text.encode()  # half of a surrogate pair can be spelled in JSON and cannot be sent
        is_object = isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise NotMarkupError
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
