"""gpu_worker: numbers that are added to some logits of some rows: biases, and ids that are forbidden for a while.

A ban takes `BAN` from a logit: more than any two logits differ by, so that the id is never picked while another one is
left. It is no infinity on purpose: where a request forbids all that its grammar allows, the least forbidden id still
wins, and a row never turns into one that failed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.gpu_worker.row_lines import Picks, RowLines, TableLines, flat_index, with_room
from services.gpu_worker.uploads import Int64s, upload

BAN = 2.0**20
OUTSIDE_BAN = 2.0**24
"""What ids lose that are not among those allowed: these are forbidden more than anything else is."""

Float32s = npt.NDArray[np.float32]


class AddedLogits:
    """What is added, by row: a line of (id, number), filled up with (0, 0.0), which changes nothing."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._rows = RowLines(max_rows, device)
        self._device = device
        self._ids = torch.zeros((0, 1), dtype=torch.int64, device=device)
        self._values = torch.zeros((0, 1), dtype=torch.float32, device=device)

    def set_row(self, row: int, ids: Int64s, values: Float32s) -> None:
        """Sets what a row gets from now on; no id twice, all of the vocabulary; none: nothing."""
        if not len(ids):
            self._rows.give_back(row)
            return
        line = self._rows.take(row)
        self._ids = with_room(self._ids, self._rows.num_lines, len(ids))
        self._values = with_room(self._values, self._rows.num_lines, len(ids))
        self._ids[line].zero_()[: len(ids)] = upload(ids, self._device)
        self._values[line].zero_()[: len(ids)] = upload(values, self._device)

    def among(self, picks: Picks) -> TableLines | None:
        """The rows of a step that get something."""
        return self._rows.among(picks)

    def apply(self, logits: Tensor, rows: TableLines) -> None:
        """Adds it ([num_rows, vocab_size] float32)."""
        ids = self._ids.index_select(0, rows.lines)
        places = flat_index(rows.logit_rows, logits.shape[1], ids)
        values = self._values.index_select(0, rows.lines)
        logits.view(-1).scatter_add_(0, places.view(-1), values.view(-1))
