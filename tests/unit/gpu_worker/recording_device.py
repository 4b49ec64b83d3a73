"""A device that records and replays on the CPU as faithfully as a CUDA graph.

Recording runs the work and keeps every operator that torch dispatches, with the very tensors it was given. Replaying
runs these operators again, without the program around them: results land in the memory of the recording, numbers that
the program had read or computed on the host stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from services.gpu_worker.attention.backend import StepAttention
from services.gpu_worker.attention.reference import ReferenceAttention, ReferenceStep
from services.gpu_worker.graph_device import Recording
from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.step_inputs import StepInputs

_READS_ON_THE_HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


@dataclass
class Recorded:
    """Operators with their arguments and results."""

    device: RecordingDevice
    calls: list[Callable[[], None]] = field(default_factory=list)

    def replay(self) -> None:
        self.device.num_replays += 1
        for call in self.calls:
            call()


@dataclass
class RecordingDevice:
    """A `GraphDevice`. `also` may record what is no operator of torch while a recording is made."""

    num_replays: int = 0
    num_recorded: int = 0
    also: Callable[[Recorded], AbstractContextManager[None]] | None = None

    def record(self, run: Callable[[], None]) -> Recording:
        run()
        recorded = Recorded(self)
        with self.also(recorded) if self.also else _nothing(), _Recorder(recorded):
            run()
        self.num_recorded += 1
        return recorded


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorded: Recorded) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded = recorded

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would load its compiler for that."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _READS_ON_THE_HOST, f"{func} waits for the device: it cannot be recorded"
        result = func(*args, **(kwargs or {}))
        self._recorded.calls.append(_call(func, args, kwargs or {}, result))
        return result


def _call(func: Any, args: Any, kwargs: Any, result: Any) -> Callable[[], None]:
    results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]

    def again() -> None:
        for old, new in zip(results, tree_flatten(func(*args, **kwargs))[0], strict=True):
            # A view, or what was written to in place, is the same memory as before.
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)

    return again


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class RecordableReference(ReferenceAttention):
    """A `CapturableAttention`, plain: each row gathers all the pages that it could have, and hides the rest."""

    def begin_decode(self, inputs: StepInputs, kv_cache: KvCache) -> StepAttention:
        return _DecodeStep(inputs, kv_cache)


class _DecodeStep(ReferenceStep):
    def attend(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        inputs, shape = self._inputs, self._kv_cache.shape
        offsets = torch.arange(shape.page_size, device=queries.device)
        slots = (inputs.page_table[:, :, None] * shape.page_size + offsets).flatten(1)  # [num_rows, longest]
        keys, values = self._kv_cache.key_slots(layer)[slots].float(), self._kv_cache.value_slots(layer)[slots].float()
        at = torch.arange(slots.shape[1], device=queries.device)
        is_hidden = at > inputs.positions[:, None]
        if window is not None:
            is_hidden |= at <= inputs.positions[:, None] - window
        grouped = queries.float().view(len(queries), shape.num_kv_heads, -1, shape.head_dim)
        scores = torch.einsum("rkgd,rckd->rkgc", grouped, keys) * queries.shape[-1] ** -0.5
        weights = scores.masked_fill(is_hidden[:, None, None], float("-inf")).softmax(dim=-1)
        values = values.masked_fill(is_hidden[:, :, None, None], 0.0)
        return torch.einsum("rkgc,rckd->rkgd", weights, values).flatten(1, 2).to(queries.dtype)
