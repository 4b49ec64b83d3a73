"""gpu_worker: small host arrays to the device without waiting for it.

A plain `torch.tensor(..., device="cuda")` waits for everything launched before: with it a step could not be prepared
while the one before runs. From page-locked memory the copy is a matter of the device's queue.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int64s = npt.NDArray[np.int64]


def upload(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor on the device; on a CPU it may share the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_together(arrays: Sequence[Int64s], device: torch.device) -> list[Tensor]:
    """Several one-dimensional arrays in one copy: a tensor for each."""
    together = upload(np.concatenate(arrays), device)
    return list(torch.split_with_sizes(together, [len(array) for array in arrays]))
