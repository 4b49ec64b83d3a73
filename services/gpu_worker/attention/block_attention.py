"""gpu_worker: attention of a row with some new tokens in float32 on a CPU (see `block_attention_loop`).

It computes what `attend_span` does, in one pass over the pages that the row's keys and values lie in.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from services.gpu_worker.attention.row_span import RowSpan
from services.gpu_worker.cpu_loops.block_attention_loop import BLOCK_ATTENTION, scratch_bytes
from services.gpu_worker.cpu_loops.team import LARGE_WORK, TEAM
from services.gpu_worker.kv_cache import KvCacheShape


class BlockAttention:
    """One row of a step, under one window; used by every layer with it.

    Args:
        span: the row.
        window: see `StepAttention.attend`.
        pages: [num_pages] int64, its pages.
        shape: of the pool, in float32 or half precision; the width of a head is one that `LoopAttention.fits`.
    """

    def __init__(self, span: RowSpan, window: int | None, pages: Tensor, shape: KvCacheShape) -> None:
        assert TEAM is not None
        self._team, self._span, self._window, self._shape = TEAM, span, window or 0, shape
        self._pages = pages.contiguous()

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """See `RowAttention.attend`."""
        span, shape = self._span, self._shape
        num_heads, room = queries.shape[1], scratch_bytes(shape.head_dim)
        numbers = (
            queries.data_ptr(), queries.stride(0), keys.data_ptr(), values.data_ptr(), self._pages.data_ptr(),
            out.data_ptr(), self._team.scratch(torch.get_num_threads() * room), room, span.num_new,
            span.end - span.num_new, self._window, num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size,
            8 * shape.dtype.itemsize,
        )  # fmt: skip
        is_large = span.length * span.num_new * num_heads * shape.head_dim >= LARGE_WORK
        self._team.run(BLOCK_ATTENTION, array("q", numbers), is_large)
