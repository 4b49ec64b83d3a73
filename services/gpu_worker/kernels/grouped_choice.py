"""gpu_worker: which product a CUDA device multiplies by all experts of a layer with.

torch has one for bfloat16 on devices of compute capability 9 and 10, whose tiles are 128 rows high; elsewhere it falls
back to a loop that waits for the device, which a recording must not. Our own kernel takes lower tiles for fewer rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.gpu_worker.kernels.grouped_product import grouped_product
from services.gpu_worker.models.expert_weights import GroupedProduct

_CAPABILITIES = (9, 10)
_ROWS_OF_EXPERT = 64  # on average, from which on torch's tiles are at least half full
_ALIGNED = 8  # features: torch's product reads lines at multiples of 16 bytes


def grouped_product_for(device: torch.device, dtype: torch.dtype) -> GroupedProduct:
    """The product for a CUDA device and weights of a dtype."""
    capability = torch.cuda.get_device_capability(device)[0]
    takes_torch = dtype == torch.bfloat16 and capability in _CAPABILITIES and hasattr(torch, "_grouped_mm")
    return torch_or_ours if takes_torch else grouped_product


def torch_or_ours(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """A `GroupedProduct`: torch's where experts have many rows, else ours."""
    return torch_product(x, stack, ends) if suits_torch(x.shape[0], stack.shape) else grouped_product(x, stack, ends)


def suits_torch(num_rows: int, stack_shape: tuple[int, ...]) -> bool:
    """Whether torch's product takes matrices of this shape, and so many rows fill its tiles."""
    num_experts, num_columns, width = stack_shape
    is_aligned = num_columns % _ALIGNED == 0 and width % _ALIGNED == 0
    return is_aligned and num_rows >= _ROWS_OF_EXPERT * num_experts


def torch_product(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """A `GroupedProduct`: torch's, for bfloat16."""
    product: Tensor = torch._grouped_mm(x, stack.transpose(1, 2), offs=ends)
    return product
