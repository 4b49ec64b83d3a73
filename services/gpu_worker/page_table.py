"""gpu_worker: which pages each row has, on the host and on the device.

Owns the table only; page ids are the scheduler's, and a row's line is simply written over when the row is used again:
what lies past a row's end is some valid page, and nobody reads it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.gpu_worker.uploads import Int64s, upload, upload_together


class PageTable:
    """Lines [0, max_rows) of at most max_pages page ids in order of position."""

    def __init__(self, max_rows: int, max_pages: int, device: torch.device) -> None:
        self._host = np.zeros((max_rows, max_pages), dtype=np.int32)
        self._num_pages = np.zeros(max_rows, dtype=np.int64)
        # On a CPU both are the same memory.
        self._on_device = upload(self._host, device) if device.type != "cpu" else torch.from_numpy(self._host)
        self._device = device
        self._changes: list[tuple[int, int, npt.NDArray[np.int32]]] = []

    @property
    def max_pages(self) -> int:
        """The longest line there can be."""
        return self._host.shape[1]

    def num_pages(self, rows: Int64s) -> Int64s:
        """Lengths of some lines."""
        return self._num_pages[rows]

    def line(self, row: int) -> list[int]:
        """The pages of a row."""
        pages: list[int] = self._host[row, : self._num_pages[row]].tolist()
        return pages

    def clear(self, row: int) -> None:
        """The row has no pages."""
        self._num_pages[row] = 0

    def append(self, row: int, pages: npt.NDArray[np.int32]) -> None:
        """Adds pages at the end of a line; the caller has checked that they fit."""
        start = int(self._num_pages[row])
        self._host[row, start : start + len(pages)] = pages
        self._num_pages[row] = start + len(pages)
        if self._device.type != "cpu":
            self._changes.append((row, start, pages))

    def slots(self, rows: Int64s, positions: Int64s, page_size: int) -> Int64s:
        """The slot of each (row, position), [num_tokens] both; every position must lie in a page of its row."""
        slots: Int64s = self._host[rows, positions // page_size] * np.int64(page_size) + positions % page_size
        return slots

    def gather(self, rows: Int64s, on_device: Tensor, width: int) -> Tensor:
        """The first `width` entries of some lines: [num_rows, width] int64 on the device, where the rows are too."""
        if on_device.is_cpu:
            return torch.from_numpy(self._host[rows, :width].astype(np.int64))
        return self._on_device[:, :width].index_select(0, on_device).to(torch.int64)

    def commit(self) -> None:
        """Brings the changes of one plan to the device. Within a plan no place changes twice."""
        if not self._changes:
            return
        places = [row * self.max_pages + np.arange(start, start + len(pages)) for row, start, pages in self._changes]
        values = [pages.astype(np.int64) for _, _, pages in self._changes]
        on_device, ids = upload_together([np.concatenate(places), np.concatenate(values)], self._device)
        self._on_device.view(-1).index_copy_(0, on_device, ids.to(torch.int32))
        self._changes = []
