"""gpu_worker: a matrix in two forms, one that is faster for few rows and one for many."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from services.gpu_worker.models.projection import Projection


@dataclass(frozen=True, slots=True)
class TwoForms:
    """A `Projection` whose rounding depends on the number of rows: for fast numerics only.

    Attributes:
        few: the form for up to `most_few_rows` rows.
        many: the form for more.
        most_few_rows: >= 1.
    """

    few: Projection
    many: Projection
    most_few_rows: int

    @property
    def num_bytes(self) -> int:
        """See `Projection.num_bytes`."""
        return self.few.num_bytes + self.many.num_bytes

    def bytes_read(self, num_rows: int) -> int:
        """See `ReadsByRows.bytes_read`: one of the forms."""
        return self.few.num_bytes if num_rows <= self.most_few_rows else self.many.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection.__call__`."""
        return self.few(x) if x.shape[0] <= self.most_few_rows else self.many(x)
