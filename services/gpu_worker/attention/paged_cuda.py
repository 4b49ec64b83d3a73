"""gpu_worker: paged attention for CUDA devices with torch's own kernels, launched one by one.

Decoding rows are gathered into padded blocks of bounded size and attended together; a row with several new tokens goes
by itself. Nothing waits for the device: all lengths are host numbers. (Runs on any device; only its speed is CUDA's.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.attention.backend import rotate_then_write
from services.gpu_worker.attention.row_span import RowSpan, additive_mask, attend_span, row_spans
from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.step_inputs import StepInputs
from services.gpu_worker.uploads import upload

# Largest gathered block of keys (and of values) in elements: 64 Mi, 128 MiB in half precision.
_MAX_BLOCK_ELEMENTS = 64 * 1024 * 1024


class PagedCudaAttention:
    """An `AttentionBackend` for CUDA devices."""

    def __init__(self, max_block_elements: int = _MAX_BLOCK_ELEMENTS) -> None:
        """`max_block_elements` bounds what decoding rows gather at once; a row that alone exceeds it goes alone."""
        self._max_block_elements = max_block_elements

    def begin_step(self, inputs: StepInputs, kv_cache: KvCache) -> PagedCudaStep:
        """See `AttentionBackend.begin_step`."""
        return PagedCudaStep(inputs, kv_cache, self._max_block_elements)


class PagedCudaStep:
    """A `StepAttention`. What layers with the same window share is laid out at the first of them."""

    def __init__(self, inputs: StepInputs, kv_cache: KvCache, max_block_elements: int) -> None:
        """Keeps the step's inputs and the pool."""
        self._inputs = inputs
        self._kv_cache = kv_cache
        self._max_block_elements = max_block_elements
        self._layouts: dict[int | None, _Layout] = {}

    def write_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `StepAttention.write_kv`."""
        self._kv_cache.write(layer, self._inputs.slot_mapping, keys, values)

    def write_rotated(self, layer: int, heads: Tensor, values: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """See `StepAttention.write_rotated`."""
        return rotate_then_write(self, layer, heads, values, cos_sin)

    def attend(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """See `StepAttention.attend`."""
        if window not in self._layouts:
            self._layouts[window] = self._lay_out(window, queries.dtype)
        layout = self._layouts[window]
        keys, values = self._kv_cache.key_slots(layer), self._kv_cache.value_slots(layer)
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for block in layout.blocks:
            attended[block.tokens] = block.attend(queries, keys, values)
        for context in layout.contexts:
            tokens = context.span.tokens
            read_keys, read_values = (pool[context.slots].to(queries.dtype) for pool in (keys, values))
            attended[tokens] = attend_span(queries[tokens], read_keys, read_values, context.mask)
        return attended

    def _lay_out(self, window: int | None, dtype: torch.dtype) -> _Layout:
        spans = row_spans(self._inputs, window)
        decoding = [span for span in spans if span.num_new == 1]
        return _Layout(
            blocks=[self._decode_block(group, dtype) for group in self._groups(decoding)],
            contexts=[self._context(span, window, dtype) for span in spans if span.num_new > 1],
        )

    def _context(self, span: RowSpan, window: int | None, dtype: torch.dtype) -> _Context:
        mask = additive_mask(span, window, dtype, self._inputs.positions.device)
        _, _, slots = self._places([span])
        return _Context(span, mask, slots[0])

    def _groups(self, spans: list[RowSpan]) -> Iterator[list[RowSpan]]:
        """Decoding rows, shortest first, in groups whose padded size stays under the bound."""
        shape = self._kv_cache.shape
        group: list[RowSpan] = []
        for span in sorted(spans, key=lambda span: span.length):
            if (
                group
                and (len(group) + 1) * span.length * shape.num_kv_heads * shape.head_dim > self._max_block_elements
            ):
                yield group
                group = []
            group.append(span)
        if group:
            yield group

    def _decode_block(self, spans: list[RowSpan], dtype: torch.dtype) -> _DecodeBlock:
        tokens, lengths, slots = self._places(spans)
        is_padding = torch.arange(slots.shape[1], device=slots.device) >= lengths[:, None]  # [num_spans, longest]
        mask = torch.zeros_like(slots, dtype=dtype).masked_fill_(is_padding, float("-inf"))
        return _DecodeBlock(tokens, slots, mask[:, None, None])

    def _places(self, spans: list[RowSpan]) -> tuple[Tensor, Tensor, Tensor]:
        """Where spans lie, int64 on the device.

        Returns:
            First new token of each [num_spans], its length [num_spans], and its slots in order [num_spans, longest]; a
            shorter span repeats its last slot.
        """
        numbers = [[span.tokens.start, span.row, span.first, span.length] for span in spans]
        device = self._inputs.positions.device
        tokens, rows, firsts, lengths = upload(np.array(numbers, dtype=np.int64).T, device)
        offsets = torch.arange(max(span.length for span in spans), device=device)
        positions = firsts[:, None] + offsets.minimum(lengths[:, None] - 1)  # [num_spans, longest]
        page_size = self._kv_cache.shape.page_size
        pages = self._inputs.page_table[rows[:, None], positions // page_size]
        return tokens, lengths, pages * page_size + positions % page_size


@dataclass(frozen=True, slots=True)
class _DecodeBlock:
    """Decoding rows that are attended together.

    Attributes:
        tokens: [num_spans] int64, their places among the new tokens.
        slots: [num_spans, longest] int64.
        mask: [num_spans, 1, 1, longest], 0 and, for padding, -inf.
    """

    tokens: Tensor
    slots: Tensor
    mask: Tensor

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of these rows: [num_spans, num_heads, head_dim]."""
        # The query heads that share a key/value head stand where a sequence of queries usually stands.
        num_spans, num_kv_heads, head_dim = len(self.tokens), *keys.shape[1:]
        grouped = queries[self.tokens].view(num_spans, num_kv_heads, -1, head_dim)  # [..., group, head_dim]
        # [num_spans, num_kv_heads, longest, head_dim] each
        context_keys, context_values = (pool[self.slots].to(queries.dtype).transpose(1, 2) for pool in (keys, values))
        attended = functional.scaled_dot_product_attention(grouped, context_keys, context_values, attn_mask=self.mask)
        return attended.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _Context:
    """A row with several new tokens: its span, mask and slots [length]."""

    span: RowSpan
    mask: Tensor | None
    slots: Tensor


@dataclass(frozen=True, slots=True)
class _Layout:
    """What all layers with one window share in a step."""

    blocks: list[_DecodeBlock]
    contexts: list[_Context]
