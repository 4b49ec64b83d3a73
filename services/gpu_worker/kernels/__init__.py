"""gpu_worker: Triton kernels of our own, for CUDA devices. Each stands beside the plain torch way that it must equal.

Nothing here is imported where Triton is not installed: who wants a kernel asks `has_triton` first.
"""

from __future__ import annotations

import importlib.util

import torch

from services.gpu_worker.models.operators import Operators, PlainOperators

MAX_HEAD_DIM = 256
"""The widest head that the kernels' tiles take; models with wider ones run with torch's operations."""


def has_triton() -> bool:
    """Whether Triton is installed (torch for CUDA brings it; torch for CPUs does not)."""
    return importlib.util.find_spec("triton") is not None


def operators_for(device: torch.device) -> Operators:
    """What a decoder layer does between its products: fused on a CUDA device where Triton is installed."""
    if device.type != "cuda" or not has_triton():
        return PlainOperators()
    from services.gpu_worker.kernels.operators import FusedOperators  # only where Triton is installed

    return FusedOperators()
