"""gpu_worker: small host arrays to the device and small tensors to the host without waiting for the device.

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
    """Several one-dimensional arrays in one copy: a tensor for each. On a CPU they may share the arrays' memory."""
    if device.type == "cpu":
        return [upload(array, device) for array in arrays]
    together = upload(np.concatenate(arrays), device)
    return list(torch.split_with_sizes(together, [len(array) for array in arrays]))


def to_host(tensor: Tensor) -> Tensor:
    """On the host, perhaps only once the device has come this far."""
    if tensor.is_cpu:
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)


def int64_column(column: bytes) -> Int64s:
    """The numbers of an int32 column of a message."""
    return np.frombuffer(column, dtype="<i4").astype(np.int64)


def int64_columns(*columns: bytes) -> Int64s:
    """The same of several columns of one length: [num_columns, length]."""
    return int64_column(b"".join(columns)).reshape(len(columns), -1)
