"""gpu_worker: attention over the paged pool: a plain reference, one way for CPUs, several for CUDA devices."""

from __future__ import annotations

import torch

from services.gpu_worker.attention.backend import AttentionBackend, WriteRotated, plain_write_rotated
from services.gpu_worker.attention.fastest import AttentionTask, fastest_attention
from services.gpu_worker.attention.flashinfer_paged import FlashInferAttention, flashinfer_problem, new_wrappers
from services.gpu_worker.attention.paged_cpu import PagedCpuAttention
from services.gpu_worker.attention.paged_cuda import PagedCudaAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.attention.varlen import VarlenAttention, varlen_function, varlen_parameters, varlen_problem
from services.gpu_worker.kernels import MAX_HEAD_DIM, triton_problem

_EVERYWHERE = ("auto", "paged", "reference")


def attention_for(
    device: torch.device, dtype: torch.dtype, head_dim: int = MAX_HEAD_DIM, *, rounds_prompts: bool = False
) -> AttentionBackend:
    """The backend for a device, the dtype of its pool, and the width of a head; see `PagedCpuAttention` for the last.

    On a CUDA device our own kernels, where Triton works and a head is no wider than they can take.
    """
    takes_kernels = device.type == "cuda" and head_dim <= MAX_HEAD_DIM and triton_problem() is None
    return _triton(device) if takes_kernels else _paged(device, dtype, None, rounds_prompts)


def attention_named(name: str, task: AttentionTask) -> AttentionBackend:
    """The backend that `--attention-backend` names; `auto`: on a CUDA device the fastest of those that there are.

    Raises:
        ValueError: it cannot run this model here; says why.
    """
    device = task.device
    if name == "reference":
        return ReferenceAttention()
    if name == "paged":
        return _paged(device, task.shape.dtype, task.dtype, task.rounds_prompts)
    if name == "auto":
        return _automatic(task)
    if problem := attention_problem(name, task):
        raise ValueError(problem)
    return _on_cuda(name, device)


def attention_problem(name: str, task: AttentionTask) -> str | None:
    """Why the backend that `--attention-backend` names cannot run, None where it can."""
    return None if name in _EVERYWHERE else _problem(name, task)


def _automatic(task: AttentionTask) -> AttentionBackend:
    if task.device.type != "cuda":
        return _paged(task.device, task.shape.dtype, task.dtype, task.rounds_prompts)
    candidates = ways_on_cuda(task) or {"paged": PagedCudaAttention()}
    return fastest_attention(candidates, task)


def ways_on_cuda(task: AttentionTask) -> dict[str, AttentionBackend]:
    """Those that go here, by name, beside torch's operations one by one; none on a CPU."""
    names = [name for name in ("triton", "varlen", "flashinfer") if _problem(name, task) is None]
    return {name: _on_cuda(name, task.device) for name in names}


def _problem(name: str, task: AttentionTask) -> str | None:
    """Why a backend for CUDA devices cannot run, None where it can."""
    if task.device.type != "cuda":
        return "it needs a CUDA device"
    if name == "varlen":
        return varlen_problem(task.shape, task.dtype, varlen_parameters())
    if name == "flashinfer":
        return flashinfer_problem(task.shape, task.dtype)
    if problem := triton_problem():
        return problem
    if task.shape.head_dim > MAX_HEAD_DIM:
        return f"the model's heads are {task.shape.head_dim} wide, its kernels take {MAX_HEAD_DIM}"
    return None


def _on_cuda(name: str, device: torch.device) -> AttentionBackend:
    if name == "varlen":
        return VarlenAttention(varlen_function(), _write_rotated())
    if name == "flashinfer":
        return FlashInferAttention(new_wrappers(device), _write_rotated())
    return _triton(device)


def _paged(
    device: torch.device, dtype: torch.dtype, computes_in: torch.dtype | None, rounds_prompts: bool
) -> AttentionBackend:
    """Of torch's own operations."""
    if device.type == "cuda":
        return PagedCudaAttention()
    return PagedCpuAttention(dtype, computes_in=computes_in, rounds_prompts=rounds_prompts)


def _triton(device: torch.device) -> AttentionBackend:
    from services.gpu_worker.attention.paged_triton import PagedTritonAttention  # only where Triton works

    return PagedTritonAttention(torch.cuda.get_device_properties(device).multi_processor_count)


def _write_rotated() -> WriteRotated:
    if triton_problem():
        return plain_write_rotated
    from services.gpu_worker.attention.paged_triton import fused_write_rotated  # only where Triton works

    return fused_write_rotated
