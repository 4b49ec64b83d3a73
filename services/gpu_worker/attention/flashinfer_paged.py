"""gpu_worker: paged attention through FlashInfer, for CUDA devices on which it is installed (flashinfer.ai).

It plans a step on the host and then runs it for each layer; its wrapper for chunks takes decoding rows as well. A plan
depends on the window and is made at the first layer that has it. Planning reads lengths on the host, so none of it can
be captured.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.attention.backend import WriteRotated
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.step_inputs import StepInputs
from services.gpu_worker.uploads import upload

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 1024 * 1024


class PagedWrapper(Protocol):
    """What is used of `flashinfer.BatchPrefillWithPagedKVCacheWrapper`, for pools of [pages, tokens, heads, width]."""

    def plan(self, *indices: Tensor | int, **options: object) -> None:
        """Prepares steps of these rows: see `FlashInferStep`."""

    def run(self, queries: Tensor, pool: tuple[Tensor, Tensor]) -> Tensor:
        """Attends as planned over one layer: [num_tokens, num_heads, head_dim]."""


def flashinfer_problem(shape: KvCacheShape, dtype: torch.dtype) -> str | None:
    """Why it cannot attend over such a pool, None where it can.

    Args:
        shape: of the pool.
        dtype: of the model.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    if dtype not in (torch.bfloat16, torch.float16) or shape.dtype != dtype:
        return "it takes models and pools in half precision, both in the same"
    if shape.head_dim not in _HEAD_DIMS:
        return f"it takes heads of {', '.join(map(str, _HEAD_DIMS))}, the model's are {shape.head_dim} wide"
    return None


def new_wrappers(device: torch.device) -> Callable[[], PagedWrapper]:
    """What makes wrappers that share one workspace on a device: they run one after another."""
    module: Any = importlib.import_module("flashinfer")
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return lambda: cast(PagedWrapper, module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"))


class FlashInferAttention:
    """An `AttentionBackend`."""

    def __init__(self, new_wrapper: Callable[[], PagedWrapper], write_rotated: WriteRotated) -> None:
        """Takes what makes wrappers, and what turns queries and keys and writes."""
        self._new_wrapper = new_wrapper
        self._write_rotated = write_rotated
        self._wrappers: dict[int | None, PagedWrapper] = {}  # one for each window: plans are kept in them

    def begin_step(self, inputs: StepInputs, kv_cache: KvCache) -> FlashInferStep:
        """See `AttentionBackend.begin_step`."""
        return FlashInferStep(inputs, kv_cache, self._wrapper, self._write_rotated)

    def _wrapper(self, window: int | None) -> PagedWrapper:
        if window not in self._wrappers:
            self._wrappers[window] = self._new_wrapper()
        return self._wrappers[window]


class FlashInferStep:
    """A `StepAttention`."""

    def __init__(
        self,
        inputs: StepInputs,
        kv_cache: KvCache,
        wrapper: Callable[[int | None], PagedWrapper],
        write_rotated: WriteRotated,
    ) -> None:
        self._inputs = inputs
        self._kv_cache = kv_cache
        self._wrapper = wrapper
        self._write_rotated = write_rotated
        self._planned: set[int | None] = set()

    def write_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `StepAttention.write_kv`."""
        self._kv_cache.write(layer, self._inputs.slot_mapping, keys, values)

    def write_rotated(self, layer: int, heads: Tensor, values: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """See `StepAttention.write_rotated`."""
        return self._write_rotated(self._inputs, self._kv_cache, layer, heads, values, cos_sin)

    def attend(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """See `StepAttention.attend`."""
        wrapper = self._wrapper(window)
        if window not in self._planned:
            self._plan(wrapper, queries, window)
            self._planned.add(window)
        return wrapper.run(queries.contiguous(), (self._kv_cache.keys[layer], self._kv_cache.values[layer]))

    def _plan(self, wrapper: PagedWrapper, queries: Tensor, window: int | None) -> None:
        inputs, shape = self._inputs, self._kv_cache.shape
        lengths = np.array(inputs.context_lengths)
        num_pages = -(-lengths // shape.page_size)
        page_starts = np.concatenate(([0], num_pages.cumsum()))
        # Where each page of each row stands in the page table, rows one after another.
        rows = np.repeat(np.arange(len(lengths)), num_pages)
        columns = np.arange(len(rows)) - page_starts[rows]
        at = upload(rows * inputs.page_table.shape[1] + columns, inputs.page_table.device)
        wrapper.plan(
            torch.tensor(inputs.query_starts, dtype=torch.int32),
            torch.from_numpy(page_starts.astype(np.int32)),
            inputs.page_table.flatten().index_select(0, at).to(torch.int32),
            torch.from_numpy((lengths - (num_pages - 1) * shape.page_size).astype(np.int32)),
            queries.shape[1],
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            window_left=-1 if window is None else window - 1,
            q_data_type=queries.dtype,
            kv_data_type=shape.dtype,
        )
