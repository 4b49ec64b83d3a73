"""gpu_worker: what a decoder layer does between its products, each in one compiled loop."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from services.gpu_worker.cpu_loops.layer_loops import ADD_NORM, GATED, NORM
from services.gpu_worker.cpu_loops.team import LARGE_WORK, TEAM
from services.gpu_worker.models.operators import PlainOperators


def _has_rows(x: Tensor) -> bool:
    """Whether what belongs to a token lies side by side: [num_tokens, width] or [num_tokens, heads, width]."""
    return (x.dim() == 2 and x.stride(1) == 1) or (x.dim() == 3 and x.stride()[1:] == (x.shape[2], 1))


_DTYPES = (torch.float32, torch.bfloat16)


class LoopOperators:
    """The `Operators` for a CPU: sums in float32, factors in float32 or bfloat16; other dtypes go the plain way."""

    def __init__(self) -> None:
        assert TEAM is not None
        self._team = TEAM
        self._plain = PlainOperators()
        self._eps: dict[float, Tensor] = {}

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operators.norm`."""
        if x.dtype != torch.float32 or not _has_rows(x):
            return self._plain.norm(x, weight, eps)
        out = torch.empty(x.shape)
        self._norm_into(out, x, weight, eps)
        return out

    def _norm_into(self, out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        rows, inner, width = x.shape[0], 1 if x.dim() == 2 else x.shape[1], x.shape[-1]
        numbers = (
            x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), out.stride(0), rows, inner, width,
            self._at(eps),
        )  # fmt: skip
        self._team.run(NORM, array("q", numbers), x.numel() >= LARGE_WORK)

    def add_norm(self, hidden: Tensor, addend: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Operators.add_norm`; the sum takes the place of `hidden`."""
        is_computed = hidden.dtype == torch.float32 and addend.dtype in _DTYPES
        if not is_computed or not (hidden.is_contiguous() and addend.is_contiguous()):
            return self._plain.add_norm(hidden, addend, weight, eps)
        out = torch.empty(addend.shape, dtype=addend.dtype)
        rows, width = hidden.shape
        numbers = (
            hidden.data_ptr(), addend.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, self._at(eps),
            8 * addend.dtype.itemsize,
        )  # fmt: skip
        self._team.run(ADD_NORM, array("q", numbers), hidden.numel() >= LARGE_WORK)
        return hidden, out

    def norm_heads(self, heads: Tensor, num_queries: int, weights: tuple[Tensor, Tensor], eps: float) -> Tensor:
        """See `Operators.norm_heads`."""
        if heads.dtype != torch.float32 or not _has_rows(heads):
            return self._plain.norm_heads(heads, num_queries, weights, eps)
        out = torch.empty(heads.shape)
        self._norm_into(out[:, :num_queries], heads[:, :num_queries], weights[0], eps)
        self._norm_into(out[:, num_queries:], heads[:, num_queries:], weights[1], eps)
        return out

    def gated(self, gate_up: Tensor) -> Tensor:
        """See `Operators.gated`."""
        if gate_up.dtype not in _DTYPES or not gate_up.is_contiguous():
            return self._plain.gated(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype)
        numbers = (gate_up.data_ptr(), out.data_ptr(), rows, width, 8 * gate_up.dtype.itemsize)
        self._team.run(GATED, array("q", numbers), gate_up.numel() >= LARGE_WORK)
        return out

    def _at(self, eps: float) -> int:
        """Where a loop finds the number in float32."""
        if eps not in self._eps:
            self._eps[eps] = torch.tensor([eps])
        return self._eps[eps].data_ptr()
