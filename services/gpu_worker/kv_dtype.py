"""gpu_worker: what keys and values are kept in: what the settings ask for, or why that cannot be."""

from __future__ import annotations

import torch

from services.gpu_worker.attention.paged_cpu import reads_halves
from services.gpu_worker.eight_bits import require_capability
from services.gpu_worker.fp8 import E4M3, E5M2
from services.runtime.config import Settings
from services.runtime.service import StartError

_EIGHT_BITS = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
_OTHERS = {"float32": torch.float32, "float16": torch.float16}


def choose_kv_dtype(settings: Settings, device: torch.device, dtype: torch.dtype, head_dim: int) -> torch.dtype:
    """The element type of the KV pool.

    Args:
        settings: `kv_cache_dtype` and `numerics`.
        device: where the pool lies.
        dtype: of the model.
        head_dim: of the model.

    Raises:
        StartError: what was asked for does not go with this model or this device.
    """
    name = settings.kv_cache_dtype
    flag = f"--kv-cache-dtype {name}"
    takes_halves = device.type == "cpu" and dtype == torch.float32 and reads_halves(head_dim)
    if name == "auto":
        return torch.float16 if takes_halves and settings.numerics == "fast" else dtype
    if name in _OTHERS:
        if _OTHERS[name] == dtype or (name == "float16" and takes_halves):
            return _OTHERS[name]
        raise StartError(f"{flag} does not go with a model in {str(dtype).removeprefix('torch.')} here: leave it out")
    if device.type == "cuda":
        require_capability(flag, device)
        if dtype == torch.float32:
            raise StartError(f"{flag} goes with half precision on a CUDA device: --dtype bfloat16")
    return _EIGHT_BITS[name]
