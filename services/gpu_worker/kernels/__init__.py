"""gpu_worker: Triton kernels of our own, for CUDA devices. Each stands beside the plain torch way that it must equal.

No module below is imported where Triton cannot work: who wants a kernel asks `triton_problem` first.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path
from typing import TypeVar

import torch

from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.projection import Projection
from services.gpu_worker.products.fp8 import RoundRows, round_rows

P = TypeVar("P", bound=Projection)

MAX_HEAD_DIM = 256
"""The widest head that the kernels' tiles take; models with wider ones run with torch's operations."""


def triton_problem() -> str | None:
    """Why no kernel of ours can be launched on this machine's CUDA devices, or None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (torch for CUDA brings it)"
    if shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton needs a C compiler to launch kernels, there is neither gcc nor clang"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs Python.h to launch kernels (a package such as python3-dev has it)"
    return None


def with_fast_experts(weights: DecoderWeights[P], device: torch.device) -> DecoderWeights[P]:
    """The same model; on a CUDA device where Triton works, all experts of a layer are multiplied at once."""
    if device.type != "cuda" or triton_problem():
        return weights
    from services.gpu_worker.kernels.expert_steps import FusedExpertSteps  # only where Triton works
    from services.gpu_worker.kernels.grouped_choice import grouped_product_for

    return weights.with_grouped_product(grouped_product_for(device, weights.embedding.dtype), FusedExpertSteps())


def rounding_for(device: torch.device) -> RoundRows:
    """How inputs of 8-bit products are rounded: by a kernel on a CUDA device where Triton works."""
    if device.type != "cuda" or triton_problem():
        return round_rows
    from services.gpu_worker.kernels import fp8_rows  # only where Triton works

    return fp8_rows.round_rows
