"""gpu_worker: which operators a decoder layer runs between its products: fused ones of this device, or the plain."""

from __future__ import annotations

import torch

from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.kernels import triton_problem
from services.gpu_worker.models.operators import Operators, PlainOperators


def operators_for(device: torch.device) -> Operators:
    """Compiled loops on a CPU, kernels on a CUDA device; plain operators where there are none."""
    if device.type == "cpu" and not loops_problem():
        from services.gpu_worker.cpu_loops.operators import LoopOperators  # only where there is numba

        return LoopOperators()
    if device.type == "cuda" and not triton_problem():
        from services.gpu_worker.kernels.operators import FusedOperators  # only where Triton works

        return FusedOperators()
    return PlainOperators()
