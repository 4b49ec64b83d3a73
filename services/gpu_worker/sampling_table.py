"""gpu_worker: how each row samples, by row, on the host, filled when a request takes the row.

It never draws: it sorts the rows of a step into the groups that the sampler works on, and uploads each in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from services.gpu_worker.random_numbers import stream_key
from services.gpu_worker.sampler import GREEDY_TEMPERATURE, NUM_COLUMNS, DrawnRows
from services.gpu_worker.uploads import upload
from services.wire.request_params import SamplingParams

Int64s = npt.NDArray[np.int64]


class Kind(IntEnum):
    """How a row picks its token."""

    GREEDY = 0
    DRAWING = 1  # temperature, perhaps min_p
    FILTERING = 2  # top_k or top_p on top


def kind_of(params: SamplingParams) -> Kind:
    """How a request samples. top_p 0 and top_k 1 leave one token: greedy."""
    if params.temperature <= GREEDY_TEMPERATURE or params.top_p <= 0 or params.top_k == 1:
        return Kind.GREEDY
    return Kind.FILTERING if params.top_k > 0 or params.top_p < 1 else Kind.DRAWING


class SamplingTable:
    """The sampling parameters of rows [0, max_rows)."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._columns = np.zeros((NUM_COLUMNS, max_rows), dtype=np.int64)  # the first and the third are of a step
        self._kinds = np.zeros(max_rows, dtype=np.int8)
        self._has_min_p = np.zeros(max_rows, dtype=np.bool_)

    def set_rows(self, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Sets how some rows sample from now on."""
        floats = self._columns.view(np.float64)
        for row, each in zip(rows, params, strict=True):
            self._kinds[row] = kind_of(each)
            self._has_min_p[row] = each.min_p > 0
            self._columns[1, row] = stream_key(each.seed, each.choice)
            self._columns[3, row] = each.top_k
            floats[4:, row] = each.temperature, min(each.top_p, 1.0), each.min_p

    def groups(self, rows: Int64s, positions: Int64s, logit_rows: Int64s | None = None) -> list[DrawnRows]:
        """Those of some rows that draw, by kind.

        Args:
            rows: [n], rows that pick a token.
            positions: [n], position of the token to pick.
            logit_rows: [n], their rows of the logits; None: these are as many, in the same order.
        """
        kinds = self._kinds[rows]
        if not kinds.any():
            return []
        at = np.arange(len(rows)) if logit_rows is None else logit_rows
        groups = []
        for kind in (Kind.DRAWING, Kind.FILTERING):
            places = (kinds == int(kind)).nonzero()[0]
            if len(places):
                groups.append(self._group(at[places], rows[places], positions[places], kind))
        return groups

    def _group(self, logit_rows: Int64s, rows: Int64s, positions: Int64s, kind: Kind) -> DrawnRows:
        columns = self._columns[:, rows]
        columns[0], columns[2] = logit_rows, positions
        has_min_p = bool(self._has_min_p[rows].any())
        return DrawnRows(upload(columns, self._device), has_min_p, kind == Kind.FILTERING)
