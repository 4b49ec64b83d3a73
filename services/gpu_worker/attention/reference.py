"""gpu_worker: attention the plain way, to hold the fast ways against. Any device, any dtype, no speed.

For each row: gather its whole context by slot, repeat the key/value heads, full score matrix, mask, softmax in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.gpu_worker.attention.backend import rotate_then_write
from services.gpu_worker.kv_cache import KvCache, narrowed
from services.gpu_worker.step_inputs import StepInputs


class ReferenceAttention:
    """The `AttentionBackend` that the others must agree with."""

    def begin_step(self, inputs: StepInputs, kv_cache: KvCache) -> ReferenceStep:
        """Nothing is prepared: every layer starts from the inputs."""
        return ReferenceStep(inputs, kv_cache)


class ReferenceStep:
    """A `StepAttention`."""

    def __init__(self, inputs: StepInputs, kv_cache: KvCache) -> None:
        """Keeps the step's inputs and the pool."""
        self._inputs = inputs
        self._kv_cache = kv_cache

    def write_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `StepAttention.write_kv`."""
        dtype = self._kv_cache.shape.dtype
        self._kv_cache.key_slots(layer)[self._inputs.slot_mapping] = narrowed(keys, dtype)
        self._kv_cache.value_slots(layer)[self._inputs.slot_mapping] = narrowed(values, dtype)

    def write_rotated(self, layer: int, heads: Tensor, values: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """See `StepAttention.write_rotated`."""
        return rotate_then_write(self, layer, heads, values, cos_sin)

    def attend(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """See `StepAttention.attend`."""
        starts = self._inputs.query_starts
        rows = range(self._inputs.num_rows)
        return torch.cat([self._attend_row(layer, row, queries[starts[row] : starts[row + 1]], window) for row in rows])

    def _attend_row(self, layer: int, row: int, queries: Tensor, window: int | None) -> Tensor:
        context_length = self._inputs.context_lengths[row]
        num_new = self._inputs.query_lengths[row]
        positions = torch.arange(context_length, device=queries.device)
        page_size = self._kv_cache.shape.page_size
        slots = self._inputs.page_table[row, positions // page_size] * page_size + positions % page_size
        group = queries.shape[1] // self._kv_cache.shape.num_kv_heads
        keys = self._kv_cache.key_slots(layer)[slots].repeat_interleave(group, dim=1)  # [context, num_heads, head_dim]
        values = self._kv_cache.value_slots(layer)[slots].repeat_interleave(group, dim=1)

        scores = torch.einsum("qhd,chd->hqc", queries.float(), keys.float()) * queries.shape[-1] ** -0.5
        query_positions = positions[-num_new:, None]
        hidden = positions > query_positions  # [num_new, context]
        if window is not None:
            hidden |= positions <= query_positions - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqc,chd->qhd", weights, values.float()).to(queries.dtype)
