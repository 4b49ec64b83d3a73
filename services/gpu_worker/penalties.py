"""gpu_worker: repetition, frequency and presence penalties.

On the device lie for each row with a penalty a line of counts over the vocabulary and a list of the ids with a count:

    seen  [num_lines, vocab_size] int32    2 x (times the id is in the output) + (1 if it is in the prompt)
    ids   [num_lines, capacity] int32      every id whose count is not 0, some twice; past the end whatever was there

A step looks only at the listed logits, some hundreds instead of the whole vocabulary: reads them, computes, writes them
back. An id that is listed twice gets the same value twice, and one with a count of 0 the value it had: so the list is
never searched, and a line needs no clean end. A picked token is counted where it was picked, on the device, so that the
next step can go out before anybody has read it.

Memory: 4 bytes for an id of the vocabulary and 4 for a token, about 0.6 MB for a row with 150,000 ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.row_lines import Picks, RowLines, TableLines, flat_index, with_room
from services.gpu_worker.uploads import Int64s, upload, upload_together
from services.wire.request_params import LogitRules

LEAST_REPETITION = 2.0**-10
"""A smaller repetition penalty acts like this one: logits divided by almost nothing are infinite, or pass a ban."""

_FIRST_CAPACITY = 256  # ids listed before the list grows


@dataclass(frozen=True, slots=True)
class PenalizedRows:
    """Rows of a step with a penalty.

    Attributes:
        at: where they lie.
        ends: [n] int64 on the device, listed ids of each.
        width: the most of them, known on the host.
        host_lines: [n] their lines, on the host.
    """

    at: TableLines
    ends: Tensor
    width: int
    host_lines: Int64s


def has_penalty(rules: LogitRules) -> bool:
    """Whether any of the three does something."""
    return rules.repetition_penalty != 1 or rules.frequency_penalty != 0 or rules.presence_penalty != 0


class Penalties:
    """The penalties of rows [0, max_rows), and what they have seen."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._rows = RowLines(max_rows, device)
        self._device = device
        self._vocab_size = vocab_size
        self._seen = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._ids = torch.zeros((0, _FIRST_CAPACITY), dtype=torch.int32, device=device)
        self._num_ids = np.zeros(max_rows, dtype=np.int64)  # by line
        self._factors = torch.zeros((max_rows, 3), dtype=torch.float32, device=device)  # by line

    def set_row(self, row: int, rules: LogitRules | None, prompt: Int64s, output: Int64s) -> None:
        """Sets what a row is penalized for from now on; all ids lie in the vocabulary."""
        if rules is None or not has_penalty(rules):
            self._rows.give_back(row)
            return
        line = self._rows.take(row)
        in_prompt = np.unique(prompt) if rules.repetition_penalty != 1 else prompt[:0]
        ids, counts = np.unique(output, return_counts=True)
        listed = np.union1d(in_prompt, ids)
        seen = np.isin(listed, in_prompt).astype(np.int64)
        seen[np.searchsorted(listed, ids)] += 2 * counts
        self._grow(len(listed))
        on_device, values = upload_together([listed, seen], self._device)
        self._seen[line].zero_().index_copy_(0, on_device, values.to(torch.int32))
        self._ids[line, : len(listed)] = on_device.to(torch.int32)
        self._num_ids[line] = len(listed)
        repetition = max(rules.repetition_penalty, LEAST_REPETITION)
        factors = np.array([repetition, rules.frequency_penalty, rules.presence_penalty], dtype=np.float32)
        self._factors[line] = upload(factors, self._device)

    def among(self, picks: Picks) -> PenalizedRows | None:
        """The rows of a step that have a penalty."""
        lines = self._rows.of(picks.rows)
        has_line = lines >= 0
        if not has_line.any():
            return None
        lines = lines[has_line]
        ends = self._num_ids[lines]
        logit_rows, on_device, device_ends = upload_together([picks.logit_rows[has_line], lines, ends], self._device)
        return PenalizedRows(TableLines(logit_rows, on_device), device_ends, int(ends.max()), lines)

    def apply(self, logits: Tensor, rows: PenalizedRows) -> None:
        """Changes the logits ([num_rows, vocab_size] float32) of ids that were seen."""
        lines = rows.at.lines
        ids = self._ids[:, : rows.width].index_select(0, lines).to(torch.int64)  # [n, width]
        places = flat_index(rows.at.logit_rows, self._vocab_size, ids)
        seen = self._seen.view(-1)[flat_index(lines, self._vocab_size, ids)]
        repetition, frequency, presence = torch.split(self._factors[lines], 1, dim=1)  # [n, 1]
        flat = logits.view(-1)
        values = flat[places]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(seen > 0, repeated, values)
        counts = seen >> 1
        values = values - counts * frequency - (counts > 0) * presence
        flat.scatter_(0, places.view(-1), values.view(-1))

    def keep(self, rows: PenalizedRows, token_ids: Tensor) -> None:
        """Counts what the rows have picked ([n] int64)."""
        self._grow(rows.width + 1)
        self._ids.index_put_((rows.at.lines, rows.ends), token_ids.to(torch.int32))
        more = torch.full_like(token_ids, 2, dtype=torch.int32)
        self._seen.view(-1).scatter_add_(0, rows.at.lines * self._vocab_size + token_ids, more)
        self._num_ids[rows.host_lines] += 1

    def append(self, row: int, token_ids: Int64s) -> None:
        """Counts ids that a row got without picking them."""
        line = int(self._rows.of(np.array([row]))[0])
        if line < 0:
            return
        ids, counts = np.unique(token_ids, return_counts=True)
        start = int(self._num_ids[line])
        self._grow(start + len(ids))
        on_device, more = upload_together([ids, 2 * counts], self._device)
        self._seen[line].index_add_(0, on_device, more.to(torch.int32))
        self._ids[line, start : start + len(ids)] = on_device.to(torch.int32)
        self._num_ids[line] = start + len(ids)

    def _grow(self, width: int) -> None:
        self._seen = with_room(self._seen, self._rows.num_lines, self._vocab_size)
        self._ids = with_room(self._ids, self._rows.num_lines, width)
