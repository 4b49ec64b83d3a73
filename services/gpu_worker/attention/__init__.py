"""gpu_worker: attention over the paged pool: a plain reference, one for CPUs, one for CUDA devices."""

from __future__ import annotations

import torch

from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.attention.paged_cpu import PagedCpuAttention
from services.gpu_worker.attention.paged_cuda import PagedCudaAttention


def attention_for(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend for a device and the dtype of its pool."""
    return PagedCudaAttention() if device.type == "cuda" else PagedCpuAttention(dtype)
