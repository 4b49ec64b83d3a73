"""gpu_worker: silu(gate) * up in one kernel."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from services.gpu_worker.kernels.jit import kernel, power_of_two

_MOST_COLUMNS = 1024


def gated(gate_up: Tensor) -> Tensor:
    """The inner part of a gated feed-forward layer (arXiv 2002.05202).

    Args:
        gate_up: [num_tokens, 2 * width] contiguous, gates first.

    Returns:
        [num_tokens, width] in the same dtype.
    """
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_MOST_COLUMNS, power_of_two(width))
    _gated[(num_tokens, -(-width // block))](gate_up, output, width=width, block=block)
    return output


@kernel
def _gated(gate_up: tl.tensor, output: tl.tensor, width: tl.constexpr, block: tl.constexpr) -> None:
    """Some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_there = columns < width
    gate = tl.load(gate_up + token * 2 * width + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (token * 2 + 1) * width + columns, mask=is_there, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + token * width + columns, (opened * up).to(output.dtype.element_ty), mask=is_there)
