"""gpu_worker: `--quantization int8` and `int4`: what the settings ask for, or why that cannot be."""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.products.quantized_forms import QuantizedForms
from services.runtime.config import Settings
from services.runtime.service import StartError

INTEGERS = {"int8": 8, "int4": 4}
"""Bits of what `--quantization` rounds to on a CPU."""


def rounded(
    forms: CpuForms, settings: Settings, config: ModelConfig, pump: Callable[[], None] = lambda: None
) -> CpuForms | QuantizedForms:
    """The same forms of matrices that are rounded first, where the settings ask for that.

    Args:
        forms: of matrices as they are.
        settings: `quantization`.
        config: of the part of the model that this process holds.
        pump: see `CpuForms`.
    """
    num_bits = INTEGERS.get(settings.quantization)
    return forms if num_bits is None else QuantizedForms(forms, config, num_bits, pump)


def check_rounding(settings: Settings, device: torch.device) -> None:
    """StartError where weights are to be rounded to integers and the device stands against it."""
    if settings.quantization in INTEGERS and device.type != "cpu":
        raise StartError(f"--quantization {settings.quantization} is for a CPU (--device cpu)")
