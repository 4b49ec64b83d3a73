"""What was typed in earlier chats: one JSON text a line in the user's state directory, readable by the user alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from services.runtime.config import user_directory

_MAX_ENTRIES = 1000


def history_path() -> Path:
    """Where the history lies."""
    state = user_directory("XDG_STATE_HOME", Path.home() / ".local" / "state")
    return state / "tokenway" / "chat_history.jsonl"


class History:
    """A file of inputs, the oldest first. Chats that run at the same time each add to its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem = ""
        """Why the last input could not be kept; "" while all is well."""

    def load(self) -> list[str]:
        """The last inputs; lines that are none of ours are passed over. A long file is cut here."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []  # the first chat
        if len(lines) > 2 * _MAX_ENTRIES:
            lines = lines[-_MAX_ENTRIES:]
            self._replace(lines)
        return [entry for entry in map(_entry, lines[-_MAX_ENTRIES:]) if entry]

    def add(self, text: str) -> None:
        """Keeps one more input."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(text) + "\n")
        except OSError as error:
            self.problem = f"the history cannot be kept: {error}"

    def _replace(self, lines: Sequence[str]) -> None:
        new = self._path.with_suffix(".new")
        with suppress(OSError):  # it stays long then
            descriptor = os.open(new, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
            new.replace(self._path)


def _entry(line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
