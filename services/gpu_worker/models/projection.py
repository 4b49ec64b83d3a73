"""gpu_worker: a matrix of the model that inputs are multiplied by, with its bias.

How the product is computed is the projection's own affair: the plain way here is the reference, and the only one on a
CUDA device; on a CPU a model's projections are made anew once it is loaded (see `products`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.nn import functional


class Projection(Protocol):
    """x -> x @ weight.T + bias."""

    @property
    def num_bytes(self) -> int:
        """Memory that its weights take, all forms of them."""

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, out_features] from [num_tokens, in_features], in the dtype of x; memory of its own."""


@runtime_checkable
class ReadsByRows(Protocol):
    """A `Projection` that does not read all of its weights at every call."""

    def bytes_read(self, num_rows: int) -> int:
        """Bytes of weights that a call with so many rows reads."""


@runtime_checkable
class RoundsInputs(Protocol):
    """A `Projection` that may compute in bfloat16 what it is given in float32.

    What is given in bfloat16 gives the same numbers then, without a dtype to go to and come back from.
    """

    @property
    def rounds_from(self) -> int | None:
        """The number of rows from which on it does; None: never."""


def rounds_from(projections: Iterable[Projection]) -> int | None:
    """The number of rows from which on all of them compute in bfloat16 (see `RoundsInputs`); None: never."""
    each = [projection.rounds_from if isinstance(projection, RoundsInputs) else None for projection in projections]
    known = [number for number in each if number is not None]
    return max(known) if known and len(known) == len(each) else None


@dataclass(frozen=True, slots=True)
class DenseProjection:
    """The plain way: the weights as they are, one call of torch.

    Attributes:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """See `Projection.num_bytes`."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection.__call__`."""
        return functional.linear(x, self.weight, self.bias)
