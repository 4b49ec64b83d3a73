"""gpu_worker: paged attention for CUDA devices with Triton kernels that read keys and values where they lie.

Rows with one new token are attended together, and so are the blocks of all rows with several: two launches, or three
where contexts are cut into splits. Layers share the layout; a window is a matter of the launch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.kernels.decode_attention import DecodeRows, decode_attention, splits_for
from services.gpu_worker.kernels.prefill_attention import Chunk, ChunkBlocks, cut_chunks, prefill_attention
from services.gpu_worker.kernels.rotary_kv import Pool, rotate_and_write
from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.step_inputs import StepInputs
from services.gpu_worker.uploads import upload


class PagedTritonAttention:
    """An `AttentionBackend`, and one whose decode can be captured (`CapturableAttention`)."""

    def __init__(self, num_processors: int) -> None:
        """`num_processors`: multiprocessors of the device, which contexts are cut for."""
        self._num_processors = num_processors

    def begin_step(self, inputs: StepInputs, kv_cache: KvCache) -> PagedTritonStep:
        """See `AttentionBackend.begin_step`."""
        if all(length == 1 for length in inputs.query_lengths):
            return self.begin_decode(inputs, kv_cache)
        starts, lengths, ends = inputs.query_starts, inputs.query_lengths, inputs.context_lengths
        chunks = [
            Chunk(row, starts[row], length, ends[row] - length) for row, length in enumerate(lengths) if length > 1
        ]
        decoding = None
        if rows := [row for row, length in enumerate(lengths) if length == 1]:
            places = np.array([[starts[row], row] for row in rows], dtype=np.int64).T
            tokens, lines = upload(places, inputs.positions.device)
            decoding = self._decoding(inputs, kv_cache, tokens, lines)
        is_half = kv_cache.shape.dtype.itemsize <= 2 and kv_cache.shape.head_dim <= 128
        blocks = cut_chunks(chunks, inputs.page_table, 128 if is_half else 64)
        return PagedTritonStep(inputs, kv_cache, decoding, blocks)

    def begin_decode(self, inputs: StepInputs, kv_cache: KvCache) -> PagedTritonStep:
        """See `CapturableAttention.begin_decode`."""
        rows = torch.arange(inputs.num_rows, device=inputs.positions.device)
        return PagedTritonStep(inputs, kv_cache, self._decoding(inputs, kv_cache, rows, rows), None)

    def _decoding(self, inputs: StepInputs, kv_cache: KvCache, tokens: Tensor, rows: Tensor) -> DecodeRows:
        num_kv_heads = kv_cache.shape.num_kv_heads
        splits = splits_for(len(tokens), num_kv_heads, max(inputs.context_lengths), self._num_processors)
        return DecodeRows(tokens, rows, inputs.positions, inputs.page_table, splits)


class PagedTritonStep:
    """A `StepAttention`: rows with one new token, and blocks of those with several; either may be None, not both."""

    def __init__(
        self, inputs: StepInputs, kv_cache: KvCache, decoding: DecodeRows | None, chunks: ChunkBlocks | None
    ) -> None:
        self._inputs = inputs
        self._kv_cache = kv_cache
        self._decoding = decoding
        self._chunks = chunks

    def write_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `StepAttention.write_kv`."""
        self._kv_cache.write(layer, self._inputs.slot_mapping, keys, values)

    def write_rotated(self, layer: int, heads: Tensor, values: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """See `StepAttention.write_rotated`; one launch."""
        return fused_write_rotated(self._inputs, self._kv_cache, layer, heads, values, cos_sin)

    def attend(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """See `StepAttention.attend`."""
        if queries.stride()[1:] != (queries.shape[2], 1):
            queries = queries.contiguous()
        keys, values = self._kv_cache.keys[layer], self._kv_cache.values[layer]
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if self._decoding is not None:
            decode_attention(queries, keys, values, self._decoding, window, attended)
        if self._chunks is not None:
            prefill_attention(queries, keys, values, self._chunks, window, attended)
        return attended


def fused_write_rotated(
    inputs: StepInputs, kv_cache: KvCache, layer: int, heads: Tensor, values: Tensor, cos_sin: tuple[Tensor, Tensor]
) -> Tensor:
    """A `backend.WriteRotated` in one launch."""
    pool = Pool(kv_cache.keys[layer], kv_cache.values[layer], inputs.slot_mapping)
    return rotate_and_write(heads, values, cos_sin, pool)
