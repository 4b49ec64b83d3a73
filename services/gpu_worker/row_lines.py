"""gpu_worker: tables on the device with a line for each row that needs one, and for no other.

Most requests use no penalty and forbid nothing. A row takes a line when it is given to a request that does, and keeps
it until it is given to one that does not; tables grow with the lines in use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.gpu_worker.uploads import Int64s, upload_together

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Picks:
    """The rows of a step that pick a token, known on the host.

    Attributes:
        places: [n] their places in the step.
        logit_rows: [n] rows of the logits; the places, unless a row is run by itself.
        rows: [n] the rows that they are.
        positions: [n] position of the token to pick: how many tokens the request has.
        num_outputs: [n] output tokens among them.
    """

    places: Int64s
    logit_rows: Int64s
    rows: Int64s
    positions: Int64s
    num_outputs: Int64s

    def select(self, which: Bools) -> Picks:
        """Some of them ([n] bool)."""
        return Picks(
            self.places[which], self.logit_rows[which], self.rows[which], self.positions[which], self.num_outputs[which]
        )  # fmt: skip

    def alone(self, place: int) -> Picks:
        """What is left when the row at that place is run by itself."""
        only = self.select(self.places == place)
        return replace(only, logit_rows=np.zeros_like(only.logit_rows))


@dataclass(frozen=True, slots=True)
class TableLines:
    """The rows of a step that use a table. On the device: [n] int64 each.

    Attributes:
        logit_rows: rows of the logits.
        lines: their lines of the table.
    """

    logit_rows: Tensor
    lines: Tensor


class RowLines:
    """Which line each row has."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._lines = np.full(max_rows, -1, dtype=np.int64)
        self._free: list[int] = []
        self._device = device
        self.num_lines = 0
        """Lines that a table must have: all that were ever in use."""

    def take(self, row: int) -> int:
        """The line of a row; it gets one if it has none."""
        if self._lines[row] < 0:
            if self._free:
                self._lines[row] = self._free.pop()
            else:
                self._lines[row] = self.num_lines
                self.num_lines += 1
        return int(self._lines[row])

    def give_back(self, row: int) -> None:
        """The row needs no line any more."""
        if self._lines[row] >= 0:
            self._free.append(int(self._lines[row]))
            self._lines[row] = -1

    def of(self, rows: Int64s) -> Int64s:
        """Their lines, -1 where there is none."""
        lines: Int64s = self._lines[rows]
        return lines

    def among(self, picks: Picks) -> TableLines | None:
        """The rows of a step that have a line; None if there is none."""
        lines = self._lines[picks.rows]
        has_line = lines >= 0
        if not has_line.any():
            return None
        return TableLines(*upload_together([picks.logit_rows[has_line], lines[has_line]], self._device))


def with_room(table: Tensor, num_lines: int, width: int, filler: int = 0) -> Tensor:
    """The table itself if it is large enough, else a larger copy, with the filler where there was nothing.

    Args:
        table: [lines, entries].
        num_lines: lines needed; when there are fewer, twice as many are made.
        width: entries needed in a line; likewise.
        filler: what new entries hold.
    """
    lines, entries = table.shape
    if num_lines <= lines and width <= entries:
        return table
    size = (
        lines if num_lines <= lines else max(num_lines, 2 * lines),
        entries if width <= entries else max(width, 2 * entries),
    )
    larger = table.new_full(size, filler)
    larger[:lines, :entries] = table
    return larger


def flat_index(lines: Tensor, width: int, columns: Tensor) -> Tensor:
    """Where (line, column) lies in a table of so many columns: [n, k] int64 from [n] and [n, k]."""
    return columns + (lines * width)[:, None]
