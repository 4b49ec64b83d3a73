"""gpu_worker: which sampler picks the tokens of a step: a compiled loop on a CPU, or the plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.sampler import DrawnRows, SampledTokens, sample

Sampler = Callable[[Tensor, Sequence[DrawnRows]], SampledTokens]
"""See `sampler.sample`."""


def sampler_for(device: torch.device) -> Sampler:
    """The loop where it can run. A process has one, so that a request's tokens do not depend on who is beside it."""
    if device.type == "cpu" and not loops_problem():
        from services.gpu_worker.cpu_loops.sampling import sample_by_loop  # only where there is numba

        return sample_by_loop
    return sample
