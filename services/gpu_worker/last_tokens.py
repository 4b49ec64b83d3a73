"""gpu_worker: the newest token of each row, on the device, so that a step can be laid out before its inputs are known.

Owns them. On a CPU, where they are known when they are asked for, they are written and read as numpy arrays, which for
the few rows of a step takes a fraction of the time of torch's operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.gpu_worker.row_lines import Picks
from services.gpu_worker.uploads import Int64s, upload_together


class LastTokens:
    """Those of rows [0, max_rows)."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._on_host = self._token_ids.numpy() if device.type == "cpu" else None

    def keep(self, picks: Picks, token_ids: Tensor) -> None:
        """Takes what rows have picked: `token_ids` by row of the logits, int64 on the device."""
        if self._on_host is not None:
            self._on_host[picks.rows] = token_ids.numpy()[picks.logit_rows]
            return
        logit_rows, rows = upload_together([picks.logit_rows, picks.rows], self._device)
        self._token_ids.index_copy_(0, rows, token_ids.index_select(0, logit_rows))

    def upload_inputs(self, input_ids: Int64s, at: tuple[Int64s, Int64s], others: Sequence[Int64s]) -> list[Tensor]:
        """The input ids of a step on the device, and in the same copy some other arrays.

        Args:
            input_ids: [num_tokens]; may be changed.
            at: places among them, and the rows whose newest tokens belong there.
            others: one-dimensional.
        """
        places, rows = at
        if self._on_host is not None:
            input_ids[places] = self._on_host[rows]
            return upload_together([input_ids, *others], self._device)
        *uploaded, device_places, device_rows = upload_together([input_ids, *others, places, rows], self._device)
        if len(places):
            uploaded[0].index_copy_(0, device_places, self._token_ids.index_select(0, device_rows))
        return uploaded
