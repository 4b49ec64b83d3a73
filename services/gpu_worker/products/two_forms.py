"""gpu_worker: a matrix in two forms, one that is faster for few rows and one for many."""

from __future__ import annotations

from torch import Tensor

from services.gpu_worker.models.projection import Projection, RoundsInputs


class TwoForms:
    """A `Projection` whose rounding depends on the number of rows: for fast numerics only."""

    def __init__(self, few: Projection, many: Projection, most_few_rows: int = 1) -> None:
        """Takes both forms.

        Args:
            few: the form for up to `most_few_rows` rows.
            many: the form for more.
            most_few_rows: until it is known better.
        """
        self.few = few
        self.many = many
        self._most_few_rows = most_few_rows

    def settle(self, most_few_rows: int, is_always: int) -> None:
        """Says up to how many rows `few` is used; a form that never is (0 rows, or from `is_always` on) is given up."""
        self._most_few_rows = most_few_rows
        if most_few_rows == 0:
            self.few = self.many
        elif most_few_rows >= is_always:
            self.many = self.few

    @property
    def num_bytes(self) -> int:
        """See `Projection.num_bytes`."""
        return self.few.num_bytes + (0 if self.many is self.few else self.many.num_bytes)

    def bytes_read(self, num_rows: int) -> int:
        """See `ReadsByRows.bytes_read`: one of the forms."""
        return self.few.num_bytes if num_rows <= self._most_few_rows else self.many.num_bytes

    @property
    def rounds_from(self) -> int | None:
        """See `RoundsInputs`."""
        if not isinstance(self.many, RoundsInputs):
            return None
        rounded = self.many.rounds_from
        return None if rounded is None else max(rounded, self._most_few_rows + 1)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection.__call__`."""
        return self.few(x) if x.shape[0] <= self._most_few_rows else self.many(x)
