"""gpu_worker: how each row samples, as one device tensor by row, filled when a request takes the row.

Owns that tensor and what the host needs to know of it (which rows draw at all), so that a step uploads row numbers and
positions and nothing else. It never draws: it sorts the rows of a step into the groups that the sampler works on.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from services.gpu_worker.nucleus import FilterLimits
from services.gpu_worker.random_numbers import stream_key
from services.gpu_worker.sampler import GREEDY_TEMPERATURE, DrawnRows
from services.gpu_worker.uploads import upload
from services.wire.request_params import SamplingParams

Int64s = npt.NDArray[np.int64]
_NUM_WORDS = 5  # key, top_k, and the bits of the float64 temperature, top_p, min_p


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
        self._words = torch.zeros((max_rows, _NUM_WORDS), dtype=torch.int64, device=device)
        self._kinds = np.zeros(max_rows, dtype=np.int8)
        self._has_min_p = np.zeros(max_rows, dtype=np.bool_)

    def set_rows(self, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Sets how some rows sample from now on."""
        for row, each in zip(rows, params, strict=True):
            self._kinds[row] = kind_of(each)
            self._has_min_p[row] = each.min_p > 0
        words = np.empty((len(rows), _NUM_WORDS), dtype=np.int64)
        words[:, 0] = [stream_key(each.seed, each.choice) for each in params]
        words[:, 1] = [each.top_k for each in params]
        floats = words[:, 2:].view(np.float64)
        for index, each in enumerate(params):
            floats[index] = each.temperature, min(each.top_p, 1.0), each.min_p
        self._words[upload(np.asarray(rows, dtype=np.int64), self._device)] = upload(words, self._device)

    def groups(self, rows: Int64s, positions: Int64s, logit_rows: Int64s | None = None) -> list[DrawnRows]:
        """Those of some rows that draw, by kind.

        Args:
            rows: [n], rows that pick a token.
            positions: [n], position of the token to pick.
            logit_rows: [n], their rows of the logits; None: these are as many, in the same order.
        """
        at = np.arange(len(rows)) if logit_rows is None else logit_rows
        kinds = self._kinds[rows]
        groups = []
        for kind in (Kind.DRAWING, Kind.FILTERING):
            places = np.flatnonzero(kinds == kind)
            if len(places):
                groups.append(self._group(at[places], rows[places], positions[places], kind))
        return groups

    def _group(self, logit_rows: Int64s, rows: Int64s, positions: Int64s, kind: Kind) -> DrawnRows:
        on_device = upload(np.stack([logit_rows, rows, positions]), self._device)
        words = self._words[on_device[1]].T.contiguous()
        temperatures, top_ps, min_ps = words[2:].view(torch.float64)
        limits = FilterLimits(
            top_ks=words[1],
            top_ps=top_ps,
            min_ps=min_ps,
            has_min_p=bool(self._has_min_p[rows].any()),
        )
        return DrawnRows(
            on_device[0], words[0], on_device[2], temperatures.to(torch.float32), limits, kind == Kind.FILTERING
        )  # fmt: skip
