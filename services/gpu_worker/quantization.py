"""gpu_worker: turns the block formats of GGUF files into numbers, through the gguf package.

A quantized matrix is stored row by row; a row is a whole number of blocks, a block some tens of weights with their
scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf import quants
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How one tensor type of GGUF lies in a file.

    Attributes:
        name: GGUF's name of it, such as Q4_1.
        ggml_type: its number in the file.
        block_length: weights in a block.
        block_bytes: bytes of a block.
    """

    name: str
    ggml_type: int
    block_length: int
    block_bytes: int

    def num_bytes(self, shape: tuple[int, ...]) -> int | None:
        """Bytes of a tensor of this shape (rows first), None where its rows are not whole blocks."""
        if not shape or shape[-1] % self.block_length:
            return None
        return math.prod(shape) // self.block_length * self.block_bytes

    def decode(self, raw: Tensor) -> Tensor:
        """Decodes whole blocks: [num_bytes] uint8 on the CPU to [num_weights] float32.

        Damaged scales come out as NaN or infinity, for the caller to find.
        """
        with np.errstate(all="ignore"):
            values = quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(self.ggml_type))
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(-1)


def block_format(ggml_type: int) -> BlockFormat | None:
    """The format of a tensor type, None where the gguf package cannot decode it."""
    try:
        kind = gguf.GGMLQuantizationType(ggml_type)
        block_length, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        one_block = np.zeros((1, block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            quants.dequantize(one_block, kind)
    except (ValueError, KeyError, NotImplementedError):  # the last is how gguf says that it knows only the name
        return None
    return BlockFormat(kind.name, ggml_type, block_length, block_bytes)
