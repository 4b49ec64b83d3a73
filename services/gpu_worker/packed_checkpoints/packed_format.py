"""gpu_worker: what a form of packed checkpoints has to say about itself: the tensors of a matrix, and how to decode it.

In the files a matrix that the model calls `stem.weight` is several tensors, `stem.qweight` and `stem.scales` and so on.
Everything that shapes and types tell is checked before any data is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.gpu_worker.packed_checkpoints.codes import Decoded
from services.gpu_worker.weight_sources.source import StoredTensor

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor of a packed matrix, as the file's header describes it."""

    tensor: StoredTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.tensor.shape

    def require(self, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]) -> None:
        """Raises ModelFileError unless it has one of the types and one of the shapes."""
        if self.dtype not in dtypes:
            names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise self.tensor.error(f"is in {str(self.dtype).removeprefix('torch.')}, {names} is expected")
        if self.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise self.tensor.error(f"has shape {list(self.shape)}, {expected} is expected")

    def require_matrix(self, dtype: torch.dtype) -> tuple[int, int]:
        """Its shape, that of a matrix of this type; raises ModelFileError otherwise."""
        if self.dtype != dtype or len(self.shape) != 2:
            name = str(dtype).removeprefix("torch.")
            raise self.tensor.error(f"is no matrix of {name}")
        return self.shape[0], self.shape[1]


class PackedFormat(Protocol):
    """A form of packed checkpoints. Parts are named by what follows the stem and a point."""

    @property
    def name(self) -> str:
        """In a few words, for the log."""

    @property
    def marker(self) -> str:
        """The part whose presence, in one of `marker_dtypes`, shows that a matrix is packed."""

    @property
    def marker_dtypes(self) -> frozenset[torch.dtype]:
        """See `marker`."""

    @property
    def required(self) -> tuple[str, ...]:
        """The other parts that every packed matrix has."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Parts that it may have."""

    @property
    def index(self) -> str:
        """The optional part that tells the group of each input, "" where there is none."""

    @property
    def without_meaning(self) -> tuple[str, ...]:
        """Endings of tensors that say nothing about weights: scales of activations, which are not quantized here."""

    def shape(self, parts: Mapping[str, StoredPart]) -> tuple[int, int]:
        """[out_features, in_features]. Raises ModelFileError where the parts do not fit each other."""

    def may_have_grid(self, parts: Mapping[str, StoredPart]) -> bool:
        """Whether such a matrix lies on a 4-bit grid, if its index keeps neighbours together."""

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Decoded:
        """Takes a matrix out of its packing.

        Args:
            parts: on the CPU, as stored.
            shape: what `shape` found.

        Raises:
            ValueError: a number in them is impossible; says which part and what.
        """
