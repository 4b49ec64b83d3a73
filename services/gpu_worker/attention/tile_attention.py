"""gpu_worker: attention of a row with many new tokens on a CPU's registers for tiles (see `tile_attention_loop`).

It computes what `attended_parts` does, for tokens that each see all before them, in one pass over the keys.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from services.gpu_worker.attention.row_span import RowSpan
from services.gpu_worker.cpu_loops.team import TEAM
from services.gpu_worker.cpu_loops.tile_attention_loop import (
    BLOCK,
    BYTES_BESIDE,
    BYTES_BY_DIMENSION,
    LAY_OUT_KV,
    TILE_ATTENTION,
)
from services.gpu_worker.cpu_loops.tile_registers import DEPTH, register_shapes
from services.gpu_worker.kv_cache import KvCacheShape

_PLACES_BYTES = 8 * BLOCK


class TileAttention:
    """One row of a step, whose new tokens see all tokens up to themselves; used by every layer.

    Args:
        span: the row.
        pages: [num_pages] int64, its pages.
        shape: of the pool, in float32 or half precision.
    """

    def __init__(self, span: RowSpan, pages: Tensor, shape: KvCacheShape) -> None:
        assert TEAM is not None
        self._team, self._span, self._shape = TEAM, span, shape
        self._pages = pages.contiguous()
        size = -(-span.length // BLOCK) * BLOCK * shape.num_kv_heads * shape.head_dim
        self._keys, self._values = (torch.empty(size, dtype=torch.bfloat16) for _ in range(2))
        self._zeros = torch.zeros(shape.head_dim)
        self._registers = register_shapes()

    @staticmethod
    def fits(head_dim: int) -> bool:
        """Whether the loops take heads of this width."""
        return head_dim % DEPTH == 0

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """See `RowAttention.attend`."""
        shape, length, num_new = self._shape, self._span.length, self._span.num_new
        num_threads, num_kv_heads, dim = torch.get_num_threads(), shape.num_kv_heads, shape.head_dim
        laid_out = self._keys.data_ptr(), self._values.data_ptr()
        numbers = (
            *laid_out, keys.data_ptr(), values.data_ptr(), self._pages.data_ptr(), shape.page_size, length,
            num_kv_heads, dim, 8 * shape.dtype.itemsize, self._zeros.data_ptr(),
            self._team.scratch(num_threads * _PLACES_BYTES),
        )  # fmt: skip
        self._team.run(LAY_OUT_KV, array("q", numbers), True)
        scratch = self._team.scratch(num_threads * (dim * BYTES_BY_DIMENSION + BYTES_BESIDE))
        numbers = (
            queries.data_ptr(), queries.stride(0), *laid_out, out.data_ptr(), scratch, self._registers.data_ptr(),
            num_new, length - num_new, queries.shape[1], num_kv_heads, dim,
        )  # fmt: skip
        self._team.run(TILE_ATTENTION, array("q", numbers), True)
