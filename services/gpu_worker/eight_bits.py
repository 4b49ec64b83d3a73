"""gpu_worker: where weights of 8 bits go: what the settings ask for, or why that cannot be."""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.gpu_worker.kernels import rounding_for
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.products.fp8 import Fp8Forms
from services.runtime.config import Settings
from services.runtime.service import StartError

_LEAST_CAPABILITY = (8, 9)  # of devices that convert these numbers and multiply them


def check_fp8_weights(device: torch.device, config: ModelConfig, dtype: torch.dtype) -> None:
    """Refuses `--quantization fp8` where it does not go; `dtype`: of the model.

    Raises:
        StartError: names what is in the way.
    """
    flag = "--quantization fp8"
    if device.type != "cuda":
        raise StartError(f"{flag} needs a CUDA device that multiplies such numbers, not a CPU")
    require_capability(flag, device)
    if dtype != torch.bfloat16:
        raise StartError(f"{flag} gives results in bfloat16: --dtype bfloat16")
    if config.experts is not None:
        raise StartError(f"{flag} is not built for experts ({config.model_type})")


def fp8_forms(
    settings: Settings, config: ModelConfig, device: torch.device, pump: Callable[[], None]
) -> Fp8Forms | None:
    """What becomes of a model's matrices under `--quantization fp8`, where that goes; None without it."""
    return Fp8Forms(config, rounding_for(device), pump) if settings.quantization == "fp8" else None


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a device multiplies such numbers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def require_capability(flag: str, device: torch.device) -> None:
    """StartError where a device does not convert such numbers and multiply them; `flag`: what asked for it."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        has, needs = (".".join(map(str, each)) for each in (capability, _LEAST_CAPABILITY))
        raise StartError(f"{flag} needs a device of compute capability {needs}, this one has {has}")
