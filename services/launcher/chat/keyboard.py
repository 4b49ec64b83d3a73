"""The person's side of the terminal: a line editor with history and completion of commands."""

from __future__ import annotations

import readline

from services.launcher.chat.history import History
from services.launcher.chat.inputs import COMMANDS, Composer
from services.launcher.terminal import Style, Terminal

_PROMPT, _CONTINUATION = ">>> ", "... "


class Keyboard:
    """Reads inputs. The line editor is the process's own, so there is one of these."""

    def __init__(self, terminal: Terminal, history: History) -> None:
        self._terminal = terminal
        self._history = history
        readline.set_auto_history(False)
        readline.clear_history()
        for text in history.load():
            readline.add_history(text)
        readline.set_completer(_complete)
        readline.set_completer_delims(" \t\n")
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        if not is_libedit:  # a text of several lines that is pasted stays one input
            readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> str:
        """One input of one or several lines.

        Raises:
            EOFError: Ctrl-D.
            KeyboardInterrupt: Ctrl-C; what was typed is forgotten.
        """
        composer = Composer()
        while True:
            line = input(self._prompt(_CONTINUATION if composer.has_begun else _PROMPT))
            text = composer.add(line)
            if text is not None:
                if text.strip():
                    readline.add_history(text)
                    self._history.add(text)
                return text

    def _prompt(self, text: str) -> str:
        """The marks tell the line editor that what is between them takes no room."""
        on, off = self._terminal.code(Style.BOLD), self._terminal.reset
        return f"\001{on}\002{text}\001{off}\002" if on else text


def _complete(text: str, state: int) -> str | None:
    found = [f"/{name} " for name in COMMANDS if f"/{name}".startswith(text)] if text.startswith("/") else []
    return found[state] if state < len(found) else None
