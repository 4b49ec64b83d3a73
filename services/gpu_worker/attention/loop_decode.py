"""gpu_worker: decode attention in one compiled loop (see `cpu_loops.attention_loop`), heads turned and stored in one.

They compute what `sparse_decode` and `rotate_then_write` do. A step is not laid out first: the page table is read as it
is, so that beside the keys and values themselves next to nothing is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import llvmlite.binding
import torch
from torch import Tensor

from services.gpu_worker.attention.attended_parts import Parts
from services.gpu_worker.attention.block_attention import BlockAttention
from services.gpu_worker.attention.row_span import RowSpan
from services.gpu_worker.cpu_loops.attention_loop import DECODE_ATTENTION
from services.gpu_worker.cpu_loops.head_vectors import LANES
from services.gpu_worker.cpu_loops.layer_loops import ROTATE_AND_WRITE
from services.gpu_worker.cpu_loops.part_loops import JOIN_PARTS, ROUND_BY_HEAD, ROUND_HALVES
from services.gpu_worker.cpu_loops.team import LARGE_WORK, TEAM, Team
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.step_inputs import StepInputs


class LoopAttention:
    """What runs the loops."""

    def __init__(self) -> None:
        assert TEAM is not None
        self._team = TEAM

    def fits(self, head_dim: int) -> bool:
        """Whether the loop for attention takes heads of this width."""
        return head_dim % LANES == 0

    def reads_halves(self, head_dim: int) -> bool:
        """Whether the pool may be in half precision; without the instruction for it each number would be a call."""
        return self.fits(head_dim) and llvmlite.binding.get_host_cpu_features().get("f16c", False)

    def rounded(self, halves: Tensor) -> Tensor:
        """Numbers of a pool in half precision as bfloat16; contiguous, their last dimension a multiple of `LANES`."""
        out = torch.empty(halves.shape, dtype=torch.bfloat16)
        numbers = (out.data_ptr(), halves.data_ptr(), halves.numel() // LANES)
        self._team.run(ROUND_HALVES, array("q", numbers), halves.numel() >= LARGE_WORK)
        return out

    def rounded_by_head(self, queries: Tensor) -> Tensor:
        """What `attended_parts.by_head` makes of float32 queries, in bfloat16, before their heads are grouped."""
        num_new, num_heads, dim = queries.shape
        out = torch.empty(num_heads, num_new, dim, dtype=torch.bfloat16)
        numbers = (out.data_ptr(), queries.data_ptr(), queries.stride(0), num_new, num_heads, dim)
        self._team.run(ROUND_BY_HEAD, array("q", numbers), queries.numel() >= LARGE_WORK)
        return out

    def join(self, parts: Parts, out: Tensor) -> None:
        """Writes `attended_parts.joined` to where it belongs; the parts are in bfloat16, `out` is contiguous."""
        num_kv_heads, group, num_new, dim = parts.own.shape
        places = [
            number
            for part in (parts.before, parts.before_sums, parts.own, parts.own_sums)
            for number in (part.data_ptr(), *part.stride()[:3])
        ]
        numbers = (*places, out.data_ptr(), num_new, num_kv_heads, group, dim)
        self._team.run(JOIN_PARTS, array("q", numbers), out.numel() >= LARGE_WORK)

    def decode(self, inputs: StepInputs, spans: Sequence[RowSpan], window: int | None, kv_cache: KvCache) -> LoopDecode:
        """Prepares attention of rows with few new tokens; see `LoopDecode`."""
        return LoopDecode(self._team, inputs, spans, window, kv_cache)

    def row(self, span: RowSpan, window: int | None, pages: Tensor, shape: KvCacheShape) -> BlockAttention:
        """Prepares attention of a row with more new tokens; see `BlockAttention`."""
        return BlockAttention(span, window, pages, shape)

    def rotate_and_write(
        self,
        layer: int,
        heads: Tensor,
        values: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        slots: Tensor,
        kv_cache: KvCache,
    ) -> Tensor:
        """See `StepAttention.write_rotated`; heads are turned in place, and the queries are a view of them.

        Args:
            layer: whose pool to write to.
            heads: float32; those of a token lie side by side, as its `values` do.
            values: likewise.
            cos_sin: see `rotary_cos_sin`.
            slots: [num_tokens] int64.
            kv_cache: the pool.
        """
        num_kv_heads, dim = values.shape[1:]
        num_heads = heads.shape[1] - num_kv_heads
        cos, sin = cos_sin
        numbers = (
            heads.data_ptr(), heads.stride(0), values.data_ptr(), values.stride(0), cos.data_ptr(), sin.data_ptr(),
            slots.data_ptr(), kv_cache.keys[layer].data_ptr(), kv_cache.values[layer].data_ptr(), len(slots),
            num_heads, num_kv_heads, dim, 8 * kv_cache.shape.dtype.itemsize,
        )  # fmt: skip
        self._team.run(ROTATE_AND_WRITE, array("q", numbers), heads.numel() >= LARGE_WORK)
        return heads[:, :num_heads]


class LoopDecode:
    """Rows of one step under one window that have few new tokens; built once, used by every layer with this window.

    A new token is one that decodes, whatever the others of its row are: it sees the positions up to its own, and their
    keys and values are in the pool by then.

    Attributes:
        tokens: [number of new tokens of the spans] int64, their places among the new tokens of the step.
    """

    def __init__(
        self, team: Team, inputs: StepInputs, spans: Sequence[RowSpan], window: int | None, kv_cache: KvCache
    ) -> None:
        """Keeps where things are; where a row ends is read from the positions when the loop runs.

        Args:
            team: runs the loop.
            inputs: the step.
            spans: some of its rows, as they are under the window; none may become longer.
            window: see `StepAttention.attend`.
            kv_cache: the pool, for its sizes.
        """
        self._team = team
        self._shape = kv_cache.shape
        self.tokens = torch.tensor([token for span in spans for token in range(span.tokens.start, span.tokens.stop)])
        self._positions = inputs.positions
        self._window = window or 0
        rows = [span.row for span in spans for _ in range(span.num_new)]
        is_whole = rows == list(range(inputs.num_rows))
        self._pages = inputs.page_table.contiguous() if is_whole else inputs.page_table[rows]
        self._longest = max(span.length for span in spans)
        self._total = sum(span.length * span.num_new for span in spans)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `SparseDecode.attend`; queries may be a view of heads that lie side by side."""
        num_heads, dim = queries.shape[1:]
        out = torch.empty(len(self.tokens), num_heads, dim)
        num_scores = torch.get_num_threads() * num_heads * (self._longest + 1)
        numbers = (
            queries.data_ptr(), queries.stride(0), self.tokens.data_ptr(), self._pages.data_ptr(),
            self._pages.shape[1], self._positions.data_ptr(), self._window, keys.data_ptr(), values.data_ptr(),
            out.data_ptr(), self._team.scratch(4 * num_scores), self._longest, len(self.tokens), num_heads,
            self._shape.num_kv_heads, dim, self._shape.page_size, 8 * self._shape.dtype.itemsize,
        )  # fmt: skip
        self._team.run(DECODE_ATTENTION, array("q", numbers), self._total * num_heads * dim >= LARGE_WORK)
        return out
