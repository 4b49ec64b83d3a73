"""An answer on the terminal while it comes: thoughts dim, words never broken at the edge."""

from __future__ import annotations

from services.launcher.chat.answer import Piece
from services.launcher.chat.text_flow import TextFlow
from services.launcher.terminal import Style, Terminal


class AnswerView:
    """Shows one answer. Where nobody watches, the text goes out as it is and thoughts are left out."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._flow = TextFlow(terminal.columns)
        self._is_waiting = True
        self._is_reasoning = False

    def wait(self) -> None:
        """Shows that an answer is awaited."""
        self._terminal.status("…")

    def show(self, piece: Piece) -> None:
        """Shows what is new."""
        if not self._terminal.is_interactive:
            if not piece.is_reasoning:
                self._terminal.write(piece.text)
            return
        if self._is_waiting:
            self._terminal.clear_status()
            self._is_waiting = False
        if piece.is_reasoning != self._is_reasoning:
            self._switch(piece.is_reasoning)
        self._terminal.write(self._flow.feed(piece.text))

    def end(self) -> None:
        """The answer is over: the cursor goes to the beginning of a line."""
        if self._is_waiting:
            self._terminal.clear_status()
        if self._terminal.is_interactive:
            self._terminal.write(self._terminal.reset)
            if self._flow.is_at_line_start:
                return
        self._terminal.write("\n")

    def _switch(self, is_reasoning: bool) -> None:
        self._is_reasoning = is_reasoning
        if is_reasoning:
            self._terminal.write(self._terminal.code(Style.DIM))
        else:
            blank = "\n" if self._flow.is_at_line_start else "\n\n"
            self._terminal.write(self._terminal.reset + self._flow.feed(blank))
