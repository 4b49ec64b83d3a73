"""Text that comes in pieces, broken into lines between words, as wide as a terminal. Pure.

A piece is shown as soon as it comes. When a word turns out not to fit, its beginning is taken back and written again on
the next line. The last column stays empty: terminals differ in where the cursor is once it is filled.
"""

from __future__ import annotations

from rich.cells import cell_len

from services.launcher.terminal import harmless

_TAB = 4


class TextFlow:
    """Where the cursor is, and what has been written on its line."""

    def __init__(self, columns: int) -> None:
        """`columns` is the width of the terminal."""
        self._limit = max(columns - 1, 2)
        self._line = ""
        self._word = ""  # the end of the line, up to the last place where it may be broken

    def feed(self, text: str) -> str:
        """What to write for more text. Control characters become U+FFFD."""
        return "".join(map(self._character, harmless(text)))

    @property
    def is_at_line_start(self) -> bool:
        """Whether nothing has been written on the present line."""
        return not self._line

    def _character(self, character: str) -> str:
        if character == "\n":
            return self._new_line()
        if character == "\t":
            character = " " * (_TAB - cell_len(self._line) % _TAB)
        if cell_len(self._line + character) <= self._limit:
            return self._append(character)
        if character.isspace():
            return self._new_line()  # a blank at the end of a line is not missed
        if self._word and self._word != self._line:
            return self._take_word_down() + self._append(character)
        return self._new_line() + self._append(character)

    def _append(self, text: str) -> str:
        self._line += text
        # Chinese and the like may be broken anywhere; what joins on to a character (an accent, a skin tone) may not.
        is_break = text.isspace() or (cell_len(text) == 2 and cell_len(self._line) > cell_len(self._line[:-1]))
        self._word = "" if is_break else self._word + text
        return text

    def _new_line(self) -> str:
        self._line = self._word = ""
        return "\n"

    def _take_word_down(self) -> str:
        word, before = self._word, self._line[: -len(self._word)]
        width = cell_len(self._line) - cell_len(before)
        self._line = self._word = word
        return f"\033[{width}D\033[K\n{word}" if width else f"\n{word}"
