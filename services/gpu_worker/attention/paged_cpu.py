"""gpu_worker: paged attention for CPUs.

Decoding rows read keys and values in place, in a compiled loop where there is one (`loop_decode`), which takes rows
with a few new tokens too, else as products of torch (`sparse_decode`). One with more goes through loops as well: in
bfloat16 through the processor's registers for tiles where it has them (`tile_attention`), in float32 through those for
vectors (`block_attention`). Else it reads its context as a view where its pages are neighbours in the pool, and
otherwise gathers it: once for a whole chunk of tokens, which then each go through all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from services.gpu_worker.attention.attended_parts import attend_parts, by_head, joined
from services.gpu_worker.attention.backend import rotate_then_write
from services.gpu_worker.attention.row_span import RowSpan, additive_mask, attend_span, row_spans
from services.gpu_worker.attention.sparse_decode import SparseDecode, has_sparse_products
from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.fp8 import is_fp8
from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.products.tiles import has_tile_loop
from services.gpu_worker.step_inputs import StepInputs

if TYPE_CHECKING:
    from services.gpu_worker.attention.loop_decode import LoopAttention
    from services.gpu_worker.attention.tile_attention import TileAttention


FEW_TOKENS = 8
"""New tokens of a row up to which each goes through the loop as if it were a row: together they would share reads."""

_MANY_TOKENS = 32
"""New tokens of a row from which on rounding its context, or attending it in two parts, costs less than it saves."""


class Decode(Protocol):
    """Attention of the decoding rows of a step."""

    tokens: Tensor

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `SparseDecode.attend`."""


class RowAttention(Protocol):
    """Attention of one row with many new tokens."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Writes attention of the row's new tokens.

        Args:
            queries: [num_new, num_heads, head_dim] float32; heads of a token lie side by side.
            keys: the layer's [num_slots, num_kv_heads, head_dim].
            values: likewise.
            out: as the queries, contiguous.
        """


class PagedCpuAttention:
    """An `AttentionBackend` for the CPU."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        computes_in: torch.dtype | None = None,
        uses_loops: bool = True,
        rounds_prompts: bool = False,
    ) -> None:
        """Finds out what there is for the pool's dtype; if nothing, decoding rows go as others do.

        Args:
            dtype: of the pool.
            computes_in: dtype of queries, and of keys and values before they are stored; None: the pool's.
            uses_loops: whether compiled loops may be used, where they can.
            rounds_prompts: whether rows with many new tokens are computed in bfloat16, as the products of so many rows
                are then too (see `has_fast_bfloat16`).
        """
        has_loops = (computes_in or dtype) == torch.float32 and dtype in (torch.float32, torch.float16)
        self._loops = _loops() if uses_loops and has_loops else None
        self._decodes_sparsely = not is_fp8(dtype) and has_sparse_products(dtype)
        self._rounds_prompts = rounds_prompts
        self._tiled = _tile_attention() if rounds_prompts and self._loops is not None else None

    def begin_step(self, inputs: StepInputs, kv_cache: KvCache) -> PagedCpuStep:
        """See `AttentionBackend.begin_step`."""
        tiled = self._tiled if self._tiled is not None and self._tiled.fits(kv_cache.shape.head_dim) else None
        return PagedCpuStep(inputs, kv_cache, self._loops, self._decodes_sparsely, self._rounds_prompts, tiled)


def reads_halves(head_dim: int) -> bool:
    """Whether the loops can run here and read a pool in half precision whose heads have this width."""
    loops = _loops()
    return loops is not None and loops.reads_halves(head_dim)


def _loops() -> LoopAttention | None:
    if loops_problem():
        return None
    from services.gpu_worker.attention.loop_decode import LoopAttention  # only where there is numba

    return LoopAttention()


def _tile_attention() -> type[TileAttention] | None:
    """What attends on tiles, if this processor has them. Its loops are compiled by then, before a step is measured."""
    if not has_tile_loop():
        return None
    from services.gpu_worker.attention.tile_attention import TileAttention  # only where there are tiles

    return TileAttention


def _sees_all_before(span: RowSpan, window: int | None) -> bool:
    """Whether each new token of a row sees all before it."""
    return window is None or span.length <= window


class PagedCpuStep:
    """A `StepAttention`. What layers with the same window share is laid out at the first of them."""

    def __init__(
        self,
        inputs: StepInputs,
        kv_cache: KvCache,
        loops: LoopAttention | None,
        decodes_sparsely: bool,
        rounds_prompts: bool,
        tiled: type[TileAttention] | None,
    ) -> None:
        """Keeps the step's inputs, the pool, what is there for decoding rows, and how others are computed."""
        self._inputs = inputs
        self._kv_cache = kv_cache
        self._loops = loops
        self._decoding_loops = loops if loops is not None and loops.fits(kv_cache.shape.head_dim) else None
        self._most_in_place = FEW_TOKENS if self._decoding_loops is not None else int(decodes_sparsely)
        self._rounds_prompts = rounds_prompts
        self._tiled = tiled
        self._longest = max(inputs.context_lengths)
        self._layouts: dict[int | None, _Layout] = {}

    def write_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `StepAttention.write_kv`."""
        self._kv_cache.write(layer, self._inputs.slot_mapping, keys, values)

    def write_rotated(self, layer: int, heads: Tensor, values: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """See `StepAttention.write_rotated`."""
        if self._loops is None:
            return rotate_then_write(self, layer, heads, values, cos_sin)
        return self._loops.rotate_and_write(layer, heads, values, cos_sin, self._inputs.slot_mapping, self._kv_cache)

    def attend(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """See `StepAttention.attend`."""
        layout = self._layout(window, queries)
        keys, values = self._kv_cache.key_slots(layer), self._kv_cache.value_slots(layer)
        if layout.decode is not None and not layout.contexts and not layout.in_loops:
            return layout.decode.attend(queries, keys, values)
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if layout.decode is not None:
            attended[layout.decoding] = layout.decode.attend(queries, keys, values)
        for part, row in layout.in_loops:
            row.attend(queries[part], keys, values, attended[part])
        for context in layout.contexts:
            tokens, dtype = context.span.tokens, context.dtype
            read_keys, read_values = (self._converted(context.read(pool), dtype) for pool in (keys, values))
            if context.is_in_parts:
                self._attend_in_parts(queries[tokens], read_keys, read_values, attended[tokens])
            else:
                attended[tokens] = attend_span(queries[tokens].to(dtype), read_keys, read_values, context.mask)
        return attended

    def _attend_in_parts(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Writes what `attend_span` returns of a context whose tokens all see what was computed before."""
        loops, num_kv_heads = self._decoding_loops, keys.shape[1]
        if loops is None or keys.dtype != torch.bfloat16:
            out.copy_(joined(attend_parts(by_head(queries, num_kv_heads, keys.dtype), keys, values)))
            return
        heads = loops.rounded_by_head(queries)
        loops.join(attend_parts(heads.view(num_kv_heads, -1, *heads.shape[1:]), keys, values), out)

    def _converted(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values in another dtype; from one half precision to the other torch goes number by number."""
        if numbers.dtype == torch.float16 and dtype == torch.bfloat16 and self._decoding_loops is not None:
            return self._decoding_loops.rounded(numbers)
        return numbers.to(dtype)

    def _layout(self, window: int | None, queries: Tensor) -> _Layout:
        if window is not None and window >= self._longest:
            window = None
        if window not in self._layouts:
            self._layouts[window] = self._lay_out(window, queries.shape[1], queries.dtype)
        return self._layouts[window]

    def _lay_out(self, window: int | None, num_heads: int, dtype: torch.dtype) -> _Layout:
        decoding: list[RowSpan] = []
        contexts: list[_Context] = []
        in_loops: list[tuple[slice, RowAttention]] = []
        for span in row_spans(self._inputs, window):
            if span.num_new <= self._most_in_place:
                decoding.append(span)
                continue
            is_long = span.num_new >= _MANY_TOKENS
            computed = torch.bfloat16 if self._rounds_prompts and is_long else dtype
            has_parts = is_long and _sees_all_before(span, window)
            pages = self._inputs.page_table[span.row]
            if has_parts and self._rounds_prompts and self._tiled is not None:
                in_loops.append((span.tokens, self._tiled(span, pages, self._kv_cache.shape)))
                continue
            if computed == torch.float32 and self._decoding_loops is not None:
                in_loops.append((span.tokens, self._decoding_loops.row(span, window, pages, self._kv_cache.shape)))
                continue
            is_in_parts = has_parts and span.num_new < span.length
            mask = None if is_in_parts else additive_mask(span, window, computed, self._inputs.positions.device)
            contexts.append(_Context(span, computed, mask, self._slots(span), is_in_parts))
        if not decoding:
            return _Layout(None, slice(0), contexts, in_loops)
        decode = self._decode(decoding, window, num_heads)
        first, end = decoding[0].tokens.start, decoding[-1].tokens.stop
        is_whole = end - first == len(decode.tokens)  # rows that decode come first in most steps
        return _Layout(decode, slice(first, end) if is_whole else decode.tokens, contexts, in_loops)

    def _decode(self, spans: list[RowSpan], window: int | None, num_heads: int) -> Decode:
        if self._decoding_loops is not None:
            return self._decoding_loops.decode(self._inputs, spans, window, self._kv_cache)
        return SparseDecode(self._inputs, spans, num_heads, self._kv_cache)

    def _slots(self, span: RowSpan) -> slice | Tensor:
        """The slots of a span in order: a slice where they are neighbours, [length] int64 where they are not."""
        page_size = self._kv_cache.shape.page_size
        first_page, end_page = span.first // page_size, -(-span.end // page_size)
        pages = self._inputs.page_table[span.row, first_page:end_page]
        if bool((pages.diff() == 1).all()):
            start = int(pages[0]) * page_size + span.first % page_size
            return slice(start, start + span.length)
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()  # [pages * page_size]
        offset = span.first - first_page * page_size
        return slots[offset : offset + span.length]


@dataclass(frozen=True, slots=True)
class _Context:
    """A row whose span is read as one block, and computed in a dtype."""

    span: RowSpan
    dtype: torch.dtype
    mask: Tensor | None
    slots: slice | Tensor
    is_in_parts: bool

    def read(self, pool: Tensor) -> Tensor:
        """[length, num_kv_heads, head_dim] out of a layer's [num_slots, num_kv_heads, head_dim]: a view if possible."""
        return pool[self.slots] if isinstance(self.slots, slice) else pool.index_select(0, self.slots)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What all layers with one window share in a step.

    Attributes:
        decode: the rows that decode.
        decoding: their places among the new tokens.
        contexts: rows that are read as a block.
        in_loops: rows with more tokens that go through a loop, each behind the places of its tokens.
    """

    decode: Decode | None
    decoding: slice | Tensor
    contexts: list[_Context]
    in_loops: list[tuple[slice, RowAttention]]
