"""gpu_worker: words, as runs of token ids, that must not come in an answer.

The last id of a word is forbidden when the ids before it are the newest of the output. The words of a row are kept
flat, an entry for each id but the last ones:

    words (5 6 7), (9), (6 8)      entries   id 5 at 2, id 6 at 1 of word 0; id 6 at 1 of word 2
                                   word      last ids 7, 9, 8; they need 2, 0, 1 entries that hold
    recent   the newest ids of the output, newest first, on the device: the sampler writes there

An entry "id at d" holds when the d-th newest id of the output is that one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.added_logits import BAN
from services.gpu_worker.row_lines import Picks, RowLines, TableLines, flat_index, with_room
from services.gpu_worker.uploads import Int64s, upload

_NO_ID = -1  # what was before the output
_NEVER_ID = -2  # of an entry that only fills up
_NEVER = 2**31 - 1  # entries that a word needs which only fills up


class BadWords:
    """The words by row, and the newest ids of its output."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._rows = RowLines(max_rows, device)
        self._device = device
        # Entries: [num_lines, most entries] int64 each.
        self._entry_ids, self._entry_ages, self._entry_words = (self._empty() for _ in range(3))
        self._last_ids, self._num_needed = self._empty(), self._empty()  # [num_lines, most words] int64
        self._recent = self._empty()  # [num_lines, most entries of a word] int64

    def set_row(self, row: int, words: list[list[int]], output: Int64s) -> None:
        """Sets the words of a row; all their ids are of the vocabulary, none is empty."""
        if not words:
            self._rows.give_back(row)
            return
        line = self._rows.take(row)
        entries = [
            (token_id, age, index)
            for index, word in enumerate(words)
            for age, token_id in enumerate(reversed(word[:-1]), start=1)
        ]
        ids, ages, of_words = (list(column) for column in zip(*entries, strict=True)) if entries else ([], [], [])
        self._entry_ids = self._set(self._entry_ids, line, ids, _NEVER_ID)
        self._entry_ages = self._set(self._entry_ages, line, ages, 1)
        self._entry_words = self._set(self._entry_words, line, of_words, 0)
        self._last_ids = self._set(self._last_ids, line, [word[-1] for word in words], 0)
        self._num_needed = self._set(self._num_needed, line, [len(word) - 1 for word in words], _NEVER)
        longest = max(len(word) for word in words) - 1
        newest = output[::-1][:longest].tolist()
        self._recent = self._set(self._recent, line, newest + [_NO_ID] * (longest - len(newest)), _NO_ID)

    def among(self, picks: Picks) -> TableLines | None:
        """The rows of a step that have words."""
        return self._rows.among(picks)

    def apply(self, logits: Tensor, rows: TableLines) -> None:
        """Forbids the last ids of words that are about to be complete ([num_rows, vocab_size] float32)."""
        recent, ages, ids, of_words, last_ids, num_needed = (
            table.index_select(0, rows.lines)
            for table in (
                self._recent, self._entry_ages, self._entry_ids, self._entry_words, self._last_ids, self._num_needed,
            )
        )  # fmt: skip
        holds = recent.gather(1, ages - 1) == ids
        num_held = torch.zeros_like(num_needed).scatter_add_(1, of_words, holds.to(torch.int64))
        taken = (num_held == num_needed) * -BAN
        places = flat_index(rows.logit_rows, logits.shape[1], last_ids)
        logits.view(-1).scatter_add_(0, places.view(-1), taken.view(-1))

    def keep(self, rows: TableLines, token_ids: Tensor) -> None:
        """Remembers what the rows have picked ([n] int64)."""
        recent = self._recent.index_select(0, rows.lines)
        self._recent.index_copy_(0, rows.lines, torch.cat([token_ids[:, None], recent[:, :-1]], dim=1))

    def append(self, row: int, token_ids: Int64s) -> None:
        """Remembers ids that a row got without picking them."""
        line = int(self._rows.of(np.array([row]))[0])
        if line >= 0:
            newest = upload(token_ids[::-1].copy(), self._device)
            self._recent[line] = torch.cat([newest, self._recent[line]])[: self._recent.shape[1]]

    def _empty(self) -> Tensor:
        return torch.zeros((0, 1), dtype=torch.int64, device=self._device)

    def _set(self, table: Tensor, line: int, values: list[int], filler: int) -> Tensor:
        """The table with these values in a line, made larger if they do not fit."""
        table = with_room(table, self._rows.num_lines, len(values), filler)
        table[line].fill_(filler)[: len(values)] = upload(np.array(values, dtype=np.int64), self._device)
        return table
