"""gpu_worker: the seam between a model and the way attention is computed.

A backend lays out one step once (`begin_step`: masks, index tensors, whatever it needs from the page table) and hands
back a `StepAttention`, which every layer of the model gets as an argument. Nothing about a step is kept outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.models.rotary import rotate
from services.gpu_worker.step_inputs import StepInputs


class StepAttention(Protocol):
    """Attention of one step over the paged pool. A layer first writes its keys and values, then attends."""

    def write_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores the new tokens' keys and values ([num_tokens, num_kv_heads, head_dim] each) in their slots."""

    def write_rotated(self, layer: int, heads: Tensor, values: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Turns the new tokens' queries and keys by their positions and stores keys and values.

        Args:
            layer: whose pool to write to.
            heads: [num_tokens, num_heads + num_kv_heads, head_dim], queries, then keys, not rotated yet; may be a view,
                whose tokens lie apart but not their heads, and may be rotated in place.
            values: [num_tokens, num_kv_heads, head_dim]; likewise.
            cos_sin: of the new tokens' positions, see `rotary_cos_sin`.

        Returns:
            The rotated queries, [num_tokens, num_heads, head_dim].
        """

    def attend(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """Causal attention of every new token over its row's tokens up to itself.

        Args:
            layer: whose keys and values to read.
            queries: [num_tokens, num_heads, head_dim], positions already rotated in.
            window: the token sees only itself and the `window - 1` tokens before it; None: all of them.

        Returns:
            [num_tokens, num_heads, head_dim], in the dtype of the queries. A token's result depends on its row only.
        """


def rotate_then_write(
    step: StepAttention, layer: int, heads: Tensor, values: Tensor, cos_sin: tuple[Tensor, Tensor]
) -> Tensor:
    """`StepAttention.write_rotated` the plain way, one thing after the other."""
    rotated = rotate(heads, *cos_sin)  # [num_tokens, num_heads + num_kv_heads, head_dim]
    num_heads = heads.shape[1] - values.shape[1]
    step.write_kv(layer, rotated[:, num_heads:], values)
    return rotated[:, :num_heads]


# (inputs, kv_cache, layer, heads, values, cos_sin) -> queries: `StepAttention.write_rotated` of a step over a pool.
WriteRotated = Callable[[StepInputs, KvCache, int, Tensor, Tensor, tuple[Tensor, Tensor]], Tensor]


def plain_write_rotated(
    inputs: StepInputs, kv_cache: KvCache, layer: int, heads: Tensor, values: Tensor, cos_sin: tuple[Tensor, Tensor]
) -> Tensor:
    """A `WriteRotated` of torch's operations."""
    rotated = rotate(heads, *cos_sin)  # [num_tokens, num_heads + num_kv_heads, head_dim]
    num_heads = heads.shape[1] - values.shape[1]
    kv_cache.write(layer, inputs.slot_mapping, rotated[:, num_heads:], values)
    return rotated[:, :num_heads]


class AttentionBackend(Protocol):
    """A way to compute attention; stateless between steps."""

    def begin_step(self, inputs: StepInputs, kv_cache: KvCache) -> StepAttention:
        """Prepares what all layers of this step share."""


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """A backend whose decode reads every number of a row on the device, so that one recording serves many steps."""

    def begin_decode(self, inputs: StepInputs, kv_cache: KvCache) -> StepAttention:
        """Prepares a step in which every row has one new token.

        What it and its layers launch depends on the shapes of the tensors and on the largest of
        `inputs.context_lengths` alone: replayed with other contents and shorter rows, it does right by these.
        """
