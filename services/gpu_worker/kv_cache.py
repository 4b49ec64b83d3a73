"""gpu_worker: the paged pool of keys and values, allocated once.

Owns the memory only. Which page belongs to whom is the scheduler's business: this module never allocates or frees one.

    keys, values: [num_layers, num_pages + 1, page_size, num_kv_heads, head_dim]

Page ids 0 .. num_pages - 1 are the scheduler's. The extra last page is the *dummy page*: padding and warm-up write
there and nobody's tokens ever do.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.fp8 import as_bytes, is_fp8, to_fp8
from services.gpu_worker.uploads import upload


@dataclass(frozen=True, slots=True)
class KvCacheShape:
    """How large a page is.

    Attributes:
        num_layers: layers of the model.
        num_kv_heads: key/value heads of a layer.
        head_dim: width of a head.
        page_size: tokens in a page, >= 1.
        dtype: element type of keys and values; that of the model, half precision, or one of `fp8`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def bytes_per_page(self) -> int:
        """Keys and values of one page over all layers, in bytes."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.page_size


class KvCache:
    """The pool: keys and values of all layers, [num_layers, num_pages + 1, page_size, num_kv_heads, head_dim] each."""

    def __init__(self, shape: KvCacheShape, num_pages: int, device: torch.device) -> None:
        """Allocates the pool, zeroed: a slot that was never written must not hold a NaN (0 x NaN is NaN under a mask).

        Args:
            shape: sizes of a page.
            num_pages: pages for the scheduler, >= 0; the dummy page comes on top.
            device: where the model runs.
        """
        if num_pages < 0 or shape.page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {shape.page_size} tokens cannot be")
        self.shape = shape
        self.num_pages = num_pages
        size = (shape.num_layers, num_pages + 1, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.keys = _zeros(size, shape.dtype, device)
        self.values = _zeros(size, shape.dtype, device)

    @property
    def dummy_page_id(self) -> int:
        """The page that padding writes to."""
        return self.num_pages

    @property
    def num_bytes(self) -> int:
        """Memory held, the dummy page included."""
        return (self.num_pages + 1) * self.shape.bytes_per_page

    def key_slots(self, layer: int) -> Tensor:
        """A view of one layer's keys by slot: [(num_pages + 1) * page_size, num_kv_heads, head_dim]."""
        return self.keys[layer].flatten(0, 1)

    def value_slots(self, layer: int) -> Tensor:
        """A view of one layer's values by slot: [(num_pages + 1) * page_size, num_kv_heads, head_dim]."""
        return self.values[layer].flatten(0, 1)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores new tokens' keys and values, rounded where the pool's numbers have fewer bits.

        Args:
            layer: of the model.
            slots: [num_tokens] int64; where a slot is named twice (padding) any of the tokens stays.
            keys: [num_tokens, num_kv_heads, head_dim].
            values: likewise.
        """
        for pool, new in ((self.key_slots(layer), keys), (self.value_slots(layer), values)):
            if is_fp8(pool.dtype):
                as_bytes(pool).index_copy_(0, slots, as_bytes(narrowed(new, pool.dtype)))
            else:
                pool.index_copy_(0, slots, narrowed(new, pool.dtype))

    def zero_pages(self, page_ids: Sequence[int]) -> None:
        """Clears pages in all layers, so that what a failed row left (NaN) cannot reach whoever gets the page next."""
        if any(not 0 <= page_id < self.num_pages for page_id in page_ids):
            raise ValueError(f"pages to clear must lie in [0, {self.num_pages}): {list(page_ids)}")
        self._zero(page_ids, num_dims_of_place=1)

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Clears slots of the scheduler's pages in all layers."""
        self._zero(slots, num_dims_of_place=2)

    def _zero(self, places: Sequence[int], num_dims_of_place: int) -> None:
        """Of the dimensions behind the layers' so many tell a place: pages, or slots."""
        index = upload(np.array(places, dtype=np.int64), self.keys.device)
        for pool in (self.keys, self.values):
            numbers = as_bytes(pool) if is_fp8(pool.dtype) else pool
            numbers.flatten(1, num_dims_of_place).index_fill_(1, index, 0)


def narrowed(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as a pool of this dtype keeps them; what is too large for it becomes its largest number."""
    if numbers.dtype == dtype:
        return numbers
    if is_fp8(dtype):
        return to_fp8(numbers, dtype)
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest).to(dtype)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU they are memory that the system hands out as it is touched: a pool costs what is used of it."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(size)
