"""gpu_worker: paged attention through torch's own FlashAttention, for CUDA devices (`torch.nn.attention.varlen`).

One call attends all rows of a step, decoding ones and chunks alike. What is underneath takes half precisions and pages
that are multiples of 256 tokens; which of its parameters there are depends on torch's version.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.attention.backend import WriteRotated
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.step_inputs import StepInputs
from services.gpu_worker.uploads import upload

PAGE_MULTIPLE = 256
_MAX_HEAD_DIM = 256
_MODULE = "torch.nn.attention.varlen"
_NEEDED = ("window_size", "enable_gqa", "seqused_k", "block_table")


class VarlenFunction(Protocol):
    """What is used of `torch.nn.attention.varlen.varlen_attn`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
    ) -> Tensor:
        """Causal attention of rows' last tokens over their pages; see torch's documentation."""


def varlen_parameters() -> Collection[str]:
    """The parameters that this version of torch's function has; none where there is no such function."""
    if importlib.util.find_spec(_MODULE) is None:
        return ()
    return inspect.signature(varlen_function()).parameters.keys()


def varlen_function() -> VarlenFunction:
    """Torch's own."""
    from torch.nn.attention.varlen import varlen_attn  # not in every version

    return cast(VarlenFunction, varlen_attn)


def varlen_problem(shape: KvCacheShape, dtype: torch.dtype, parameters: Collection[str]) -> str | None:
    """Why it cannot attend over such a pool, None where it can.

    Args:
        shape: of the pool.
        dtype: of the model.
        parameters: see `varlen_parameters`.
    """
    if missing := [name for name in _NEEDED if name not in parameters]:
        return f"torch {torch.__version__} has no varlen_attn with {missing[0]}"
    if shape.page_size % PAGE_MULTIPLE:
        return f"it takes pages of multiples of {PAGE_MULTIPLE} tokens, not of {shape.page_size} (--page-size)"
    if dtype not in (torch.bfloat16, torch.float16) or shape.dtype != dtype:
        return "it takes models and pools in half precision, both in the same"
    if shape.head_dim > _MAX_HEAD_DIM or shape.head_dim % 8:
        return f"it takes heads of multiples of 8 up to {_MAX_HEAD_DIM}, the model's are {shape.head_dim} wide"
    return None


class VarlenAttention:
    """An `AttentionBackend`, and one whose decode can be captured (`CapturableAttention`)."""

    def __init__(self, function: VarlenFunction, write_rotated: WriteRotated) -> None:
        """Takes what attends, and what turns queries and keys and writes."""
        self._function = function
        self._write_rotated = write_rotated

    def begin_step(self, inputs: StepInputs, kv_cache: KvCache) -> VarlenStep:
        """See `AttentionBackend.begin_step`."""
        if all(length == 1 for length in inputs.query_lengths):
            return self.begin_decode(inputs, kv_cache)
        device = inputs.positions.device
        starts = upload(np.array(inputs.query_starts, dtype=np.int32), device)
        lengths = upload(np.array(inputs.context_lengths, dtype=np.int32), device)
        return self._step(inputs, kv_cache, starts, lengths)

    def begin_decode(self, inputs: StepInputs, kv_cache: KvCache) -> VarlenStep:
        """See `CapturableAttention.begin_decode`."""
        starts = torch.arange(inputs.num_rows + 1, dtype=torch.int32, device=inputs.positions.device)
        return self._step(inputs, kv_cache, starts, (inputs.positions + 1).to(torch.int32))

    def _step(self, inputs: StepInputs, kv_cache: KvCache, starts: Tensor, lengths: Tensor) -> VarlenStep:
        rows = _Rows(starts, lengths, inputs.page_table.to(torch.int32))
        return VarlenStep(inputs, kv_cache, rows, self._function, self._write_rotated)


@dataclass(frozen=True, slots=True)
class _Rows:
    """int32: where rows' new tokens begin [num_rows + 1], lengths with them [num_rows], pages [num_rows, max_pages]."""

    starts: Tensor
    lengths: Tensor
    pages: Tensor


class VarlenStep:
    """A `StepAttention`."""

    def __init__(
        self,
        inputs: StepInputs,
        kv_cache: KvCache,
        rows: _Rows,
        function: VarlenFunction,
        write_rotated: WriteRotated,
    ) -> None:
        self._inputs = inputs
        self._kv_cache = kv_cache
        self._rows = rows
        self._function = function
        self._write_rotated = write_rotated

    def write_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `StepAttention.write_kv`."""
        self._kv_cache.write(layer, self._inputs.slot_mapping, keys, values)

    def write_rotated(self, layer: int, heads: Tensor, values: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """See `StepAttention.write_rotated`."""
        return self._write_rotated(self._inputs, self._kv_cache, layer, heads, values, cos_sin)

    def attend(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """See `StepAttention.attend`."""
        inputs, rows = self._inputs, self._rows
        return self._function(
            queries,
            self._kv_cache.keys[layer],
            self._kv_cache.values[layer],
            rows.starts,
            None,
            max(inputs.query_lengths),
            max(inputs.context_lengths),
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
            seqused_k=rows.lengths,
            block_table=rows.pages,
        )
