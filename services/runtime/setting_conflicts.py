"""Settings that contradict each other, found from the settings alone: so before anything is started or loaded.

What depends on the device or the model is found by the worker, before it reads a weight (`gpu_worker.choices`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.runtime.capacity import asked_pool_problem, asked_step_problem

if TYPE_CHECKING:
    from services.runtime.config import Settings

ROUNDS_TO_INTEGERS = ("int8", "int4")


def contradiction(settings: Settings) -> str:
    """What cannot be had together, in one line that names the settings; "" where all can."""
    return (
        _inexact(settings)
        or _of_integers(settings)
        or asked_pool_problem(settings)
        or asked_step_problem(settings, settings.max_model_len)
    )


def _inexact(settings: Settings) -> str:
    if settings.numerics != "exact":
        return ""
    as_it_is = {"dtype": ("auto", "float32"), "kv_cache_dtype": ("auto", "float32"), "quantization": ("none",)}
    for name, values in as_it_is.items():
        value = getattr(settings, name)
        if value not in values:
            flag = f"--{name.replace('_', '-')} {value}"
            return f"--numerics exact computes in float32: {flag} goes with --numerics fast"
    return ""


def _of_integers(settings: Settings) -> str:
    asked = f"--quantization {settings.quantization}"
    if settings.quantization not in ROUNDS_TO_INTEGERS:
        return ""
    if settings.load_format == "dummy":
        return f"{asked} rounds the weights of a file, --load-format dummy reads none: set one of the two"
    if settings.dtype not in ("auto", "float32"):
        return f"{asked} is for activations in float32: --dtype {settings.dtype} goes without it"
    return ""
