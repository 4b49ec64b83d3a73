"""What a command writes for people: colours where they are wanted, widths as a terminal counts them, a status line.

Colours and lines that are written over appear on a terminal only, and colours not when NO_COLOR is set.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import TextIO

from rich.cells import cell_len, set_cell_size

from services.runtime.config import wants_no_color

_RESET = "\033[0m"
# Control characters move the cursor or command the terminal: what a model or a server sends must not.
_HARMLESS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}


class Style(StrEnum):
    """How a text stands out, as the codes of a terminal."""

    BOLD = "\033[1m"
    DIM = "\033[2m"
    RED = "\033[31m"
    GREEN = "\033[32m"
    YELLOW = "\033[33m"
    CYAN = "\033[36m"


class Terminal:
    """One output stream."""

    def __init__(self, stream: TextIO | None = None, has_color: bool | None = None) -> None:
        """Standard output unless another stream is given; whether it has colours is found out unless it is given."""
        self.stream = sys.stdout if stream is None else stream
        self.is_interactive = self.stream.isatty()
        self._has_color = self.is_interactive and not wants_no_color() if has_color is None else has_color

    @property
    def columns(self) -> int:
        """How wide it is now."""
        return shutil.get_terminal_size().columns

    def styled(self, text: str, *styles: str) -> str:
        """The text in these styles, or as it is where there are no colours."""
        return f"{''.join(styles)}{text}{_RESET}" if self._has_color and text else text

    def code(self, style: str) -> str:
        """What switches a style on; "" where there are no colours."""
        return style if self._has_color else ""

    @property
    def reset(self) -> str:
        """What switches every style off."""
        return self.code(_RESET)

    def write(self, text: str) -> None:
        """Writes at once, without a line end."""
        self.stream.write(text)
        self.stream.flush()

    def line(self, text: str = "") -> None:
        """Writes a line."""
        self.write(f"{text}\n")

    def status(self, text: str) -> None:
        """Writes over the present line, cut to the width; nothing where it cannot be written over."""
        if self.is_interactive:
            self.write(f"\r\033[K{cut(harmless(text), self.columns - 1)}")

    def clear_status(self) -> None:
        """Takes the status away."""
        if self.is_interactive:
            self.write("\r\033[K")


def harmless(text: str) -> str:
    """The text with U+FFFD for every control character but tab and line feed."""
    return text.translate(_HARMLESS)


def cut(text: str, columns: int) -> str:
    """At most so many columns of a text of one line, with an ellipsis where something is missing."""
    text = " ".join(text.split())
    if cell_len(text) <= columns:
        return text
    return set_cell_size(text, max(columns - 1, 0)).rstrip() + "…"


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows of cells as lines with even columns; those in `right` are aligned to the right, the last is not padded.

    The cells hold no styles: a terminal shows those without width.
    """
    num_columns = max(map(len, rows), default=0)
    widths = [max(cell_len(row[index]) for row in rows if index < len(row)) for index in range(num_columns)]
    return [_joined(row, widths, right) for row in rows]


def _joined(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    cells = []
    for index, text in enumerate(row):
        blanks = " " * (widths[index] - cell_len(text))
        is_last = index == len(row) - 1
        cells.append(blanks + text if index in right else text if is_last else text + blanks)
    return "  ".join(cells).rstrip()
