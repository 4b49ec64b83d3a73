"""What a person types: messages of one or several lines, and commands that begin with a slash. Pure.

A backslash at the end of a line, or three double quotes around several, make a message of more than one line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.launcher.errors import CommandError

_COMMAND = re.compile(r"/([a-z]*)(?:\s+(.*))?", re.DOTALL)
_QUOTES = '"""'

COMMANDS = {
    "system": ("[TEXT]", "show or set the system message (`/system none` takes it away)"),
    "set": ("[NAME VALUE]", "show or set a sampling field: /set temperature 0.2 (`default` takes it away)"),
    "model": ("[NAME]", "show the server's models, or use another"),
    "stats": ("[on|off]", "times and tokens of the last answer; `on`: after each one"),
    "retry": ("", "ask the last question again"),
    "undo": ("", "take back the last question and its answer"),
    "clear": ("", "forget the conversation; the system message stays"),
    "save": ("FILE", "write the conversation as JSON messages"),
    "help": ("", "this list"),
    "quit": ("", "leave, as Ctrl-D does"),
}


@dataclass(frozen=True)
class Message:
    """Something to ask the model."""

    text: str


@dataclass(frozen=True)
class Command:
    """Something to do: one of `COMMANDS`, and the text behind it."""

    name: str
    argument: str


def parse_input(text: str) -> Message | Command | None:
    """What an input means; None when it is empty. Two slashes at the beginning make a message that begins with one.

    Raises:
        CommandError: there is no such command.
    """
    stripped = text.strip()
    if not stripped:
        return None
    if stripped.startswith("//"):
        return Message(stripped[1:])
    found = _COMMAND.fullmatch(stripped)
    if found is None:  # a path, or a message
        return Message(text.strip("\n"))
    name, argument = found[1], (found[2] or "").strip()
    if name not in COMMANDS:
        raise CommandError(f"there is no command /{name}; /help shows them")
    return Command(name, argument)


class Composer:
    """Puts the lines of one input together."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._is_quoted = False

    @property
    def has_begun(self) -> bool:
        """Whether more lines belong to what is there."""
        return bool(self._lines) or self._is_quoted

    def add(self, line: str) -> str | None:
        """The input that this line completes, or None when it goes on."""
        if self._is_quoted or line.lstrip().startswith(_QUOTES):
            return self._quoted(line)
        if line.endswith("\\"):
            self._lines.append(line[:-1])
            return None
        return self._done([*self._lines, line])

    def _quoted(self, line: str) -> str | None:
        if not self._is_quoted:
            line = line.lstrip().removeprefix(_QUOTES)
            self._is_quoted = True
        if not line.rstrip().endswith(_QUOTES):
            if line or self._lines:
                self._lines.append(line)
            return None
        last = line.rstrip().removesuffix(_QUOTES)
        return self._done([*self._lines, last] if last else self._lines)

    def _done(self, lines: list[str]) -> str:
        self._lines, self._is_quoted = [], False
        return "\n".join(lines)
