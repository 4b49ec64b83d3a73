"""gpu_worker: attention over the paged pool: a plain reference, one for CPUs, two for CUDA devices."""

from __future__ import annotations

import torch

from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.attention.paged_cpu import PagedCpuAttention
from services.gpu_worker.attention.paged_cuda import PagedCudaAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.kernels import MAX_HEAD_DIM, triton_problem


def attention_for(device: torch.device, dtype: torch.dtype, head_dim: int = MAX_HEAD_DIM) -> AttentionBackend:
    """The backend for a device, the dtype of its pool, and the width of a head.

    On a CUDA device our own kernels, where Triton works and a head is no wider than they can take.
    """
    takes_kernels = device.type == "cuda" and head_dim <= MAX_HEAD_DIM and triton_problem() is None
    return _triton(device) if takes_kernels else _paged(device, dtype)


def attention_named(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The backend that `--attention-backend` names.

    Raises:
        ValueError: it cannot run this model here; says why.
    """
    if name == "reference":
        return ReferenceAttention()
    if name == "paged":
        return _paged(device, dtype)
    if name == "triton":
        _refuse_triton(device, head_dim)
        return _triton(device)
    return attention_for(device, dtype, head_dim)


def _paged(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Of torch's own operations."""
    return PagedCudaAttention() if device.type == "cuda" else PagedCpuAttention(dtype)


def _triton(device: torch.device) -> AttentionBackend:
    from services.gpu_worker.attention.paged_triton import PagedTritonAttention  # only where Triton works

    return PagedTritonAttention(torch.cuda.get_device_properties(device).multi_processor_count)


def _refuse_triton(device: torch.device, head_dim: int) -> None:
    if device.type != "cuda":
        raise ValueError("it needs a CUDA device")
    if problem := triton_problem():
        raise ValueError(problem)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"the model's heads are {head_dim} wide, its kernels take {MAX_HEAD_DIM}")
