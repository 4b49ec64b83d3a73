"""gpu_worker: decides in which form each matrix of a model is kept on a CPU, by measuring on the machine it runs on.

    --numerics exact    float32: the plain product or the packed one, whichever this machine runs faster
    --numerics fast     for many rows bfloat16 where the processor multiplies it, on its registers for tiles or packed,
                        else as exact; for few rows the codes of 4 or 8 bits where the file holds such, up to the number
                        of rows at which that is slower

One form is kept of a matrix, or two where it has codes: as long as the second forms fit their budget. Beyond it any
number of rows goes through the codes, which is slower for many.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch

from services.gpu_worker.models.projection import DenseProjection, Projection
from services.gpu_worker.products.four_bit import FourBitProjection, fits_four_bit, has_four_bit_products
from services.gpu_worker.products.grid import BYTES_OF_8_WEIGHTS, GridProjection, fits_grid_loop, has_grid_loop
from services.gpu_worker.products.kernels import PackedProjection, has_fast_bfloat16, has_packed_float32
from services.gpu_worker.products.tiles import FEW_ROWS, TileProjection, fits_tile_loop
from services.gpu_worker.products.two_forms import TwoForms
from services.gpu_worker.weight_grid import WeightGrid

_FORM_ROWS = (1, 16, 128)  # a decode, a batch of decodes, a chunk of a prompt
_CROSSOVER_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256)
_RUNS = 5
_UNRECORDED = 1.2
"""What a step takes longer than its products where they are no loops: it wakes the threads for each of the other
operators of a layer too. On two cores a whole step at 16, 20, 24 and 32 rows took 1.4, 1.3, 1.2 and 1.0 times as long
as recorded."""
_MEASURED = 8  # matrices of a shape

Measuring = Callable[[], AbstractContextManager[None]]
"""Entered while something is measured."""

Shape = tuple[int, ...]
_Kind = tuple[Shape, str, str]  # shape, codes and other form of matrices

logger = logging.getLogger(__name__)


class CpuForms:
    """The `Forms` of one model; see the module."""

    def __init__(
        self,
        is_exact: bool,
        copy_bytes: int = 2**62,
        pump: Callable[[], None] = lambda: None,
        measuring: Measuring = nullcontext,
    ) -> None:
        """Finds out what this processor and this build of torch have.

        Args:
            is_exact: whether only float32 products will do.
            copy_bytes: budget of second forms.
            pump: called for each matrix, to say that this process lives.
            measuring: what tells that time goes into measuring.
        """
        self._is_exact = is_exact
        self._copy_bytes_left = copy_bytes
        self._pump = pump
        self._measuring = measuring
        self._uses_bfloat16 = not is_exact and has_fast_bfloat16()
        self._packs: dict[Shape, bool] = {}
        self._pairs: dict[_Kind, list[TwoForms]] = {}
        self._counts: Counter[str] = Counter()

    def reads_grid(self, num_bits: int) -> bool:
        """See `Forms.reads_grid`."""
        return not self._is_exact and (has_grid_loop() or (num_bits == 4 and has_four_bit_products()))

    @property
    def description(self) -> str:
        """What was done, in a few words."""
        return ", ".join(f"{count} matrices {name}" for name, count in self._counts.most_common())

    def expect(self, num_weights: int, grid_bits: int | None) -> int:
        """See `Forms.expect`; a matrix with codes is taken to have its second form while these fit."""
        many = num_weights * (2 if self._uses_bfloat16 else 4)
        if grid_bits is None:
            return many
        codes = int(num_weights * BYTES_OF_8_WEIGHTS[grid_bits] / 8)
        if many > self._copy_bytes_left:
            return codes
        self._copy_bytes_left -= many
        return codes + many

    def lay_out(self, dense: DenseProjection, grid: WeightGrid | None) -> Projection:
        """See `Forms.lay_out`."""
        self._pump()
        return self._named(*self._for_many_rows(dense)) if grid is None else self._with_codes(dense, grid)

    def _with_codes(self, dense: DenseProjection, grid: WeightGrid) -> Projection:
        few = _by_codes(grid, dense)
        if few is None:
            return self._named(*self._for_many_rows(dense))
        codes = f"in {grid.num_bits} bits"
        many, name = self._for_many_rows(dense)
        if many.num_bytes > self._copy_bytes_left:
            return self._named(few, codes)
        self._copy_bytes_left -= many.num_bytes
        pair = TwoForms(few, many)
        self._pairs.setdefault((tuple(dense.weight.shape), codes, name), []).append(pair)
        return pair

    def _named(self, projection: Projection, name: str) -> Projection:
        self._counts[name] += 1
        return projection

    def settle(self) -> None:
        """See `Forms.settle`: measures up to how many rows the codes are faster.

        All matrices of the layers get one number: a step is recorded where each of its products goes through a loop.
        """
        of_layers = [kind for kind, pairs in self._pairs.items() if len(pairs) > 1]
        groups = [of_layers, *([kind] for kind in self._pairs if kind not in of_layers)]
        for kinds in filter(None, groups):
            compared = [Compared.of(self._pairs[kind], kind[0][1]) for kind in kinds]
            worth = _UNRECORDED if kinds is of_layers and not all(map(_ends_in_loops, compared)) else 1.0
            with self._measuring():
                most = crossover(compared, self._pump, worth)
            if all(_are_loops(shape.few) for shape in compared):
                # A single row waits for memory, of which codes read least: where that was not seen, something else ran.
                most = max(most, 1)
            for kind in kinds:
                self._settle_kind(kind, most)
        self._pairs.clear()

    def _settle_kind(self, kind: _Kind, most: int) -> None:
        pairs, (shape, codes, name) = self._pairs[kind], kind
        for pair in pairs:
            pair.settle(most, _CROSSOVER_ROWS[-1])
        both = f"{codes} for few rows and {name} for many"
        self._counts[name if most == 0 else codes if most == _CROSSOVER_ROWS[-1] else both] += len(pairs)
        logger.debug("%s of %s: codes up to %d rows", codes, shape, most)

    def _for_many_rows(self, dense: DenseProjection) -> tuple[Projection, str]:
        if not has_packed_float32():
            return dense, "plain float32"
        if self._uses_bfloat16 and fits_tile_loop(dense.weight):
            return TileProjection(dense.weight, dense.bias), "bfloat16 tiles"
        if self._uses_bfloat16:
            return PackedProjection(dense.weight, dense.bias, torch.bfloat16), "packed bfloat16"
        shape = tuple(dense.weight.shape)
        packed = PackedProjection(dense.weight, dense.bias, torch.float32)
        if shape not in self._packs:
            with self._measuring():
                self._packs[shape] = sum(_seconds([packed], rows, shape[1]) for rows in _FORM_ROWS) < sum(
                    _seconds([dense], rows, shape[1]) for rows in _FORM_ROWS
                )
        return (packed, "packed float32") if self._packs[shape] else (dense, "plain float32")


def _by_codes(grid: WeightGrid, dense: DenseProjection) -> Projection | None:
    """The product with the codes, our own or torch's; None where there is none for this matrix."""
    if fits_grid_loop(grid):
        return GridProjection(grid, dense.bias)
    return FourBitProjection(grid, dense.bias) if fits_four_bit(grid) else None


@dataclass(frozen=True, slots=True)
class Compared:
    """Matrices of one shape in two forms.

    Attributes:
        few: the codes.
        many: the other form of the same matrices.
        width: of their inputs.
        count: how many matrices they stand for.
    """

    few: Sequence[Projection]
    many: Sequence[Projection]
    width: int
    count: int

    @staticmethod
    def of(pairs: Sequence[TwoForms], width: int) -> Compared:
        """Some of the pairs, for all of them."""
        few, many = zip(*[(pair.few, pair.many) for pair in pairs[:_MEASURED]], strict=True)
        return Compared(few, many, width, len(pairs))


def crossover(shapes: Sequence[Compared], pump: Callable[[], None], worth: float) -> int:
    """The most rows (of those tried, in order) at which codes are not slower, 0 where they never are faster.

    Args:
        shapes: of matrices that are multiplied by in one step.
        pump: called for each number of rows.
        worth: how many times as long codes may take, for what else they save.
    """
    most = 0
    for rows in _CROSSOVER_ROWS:
        pump()
        # Looked at again before it is believed: something else may have run meanwhile.
        if _are_codes_slower(shapes, rows, worth) and _are_codes_slower(shapes, rows, worth):
            break
        most = rows
    return most


def _are_codes_slower(shapes: Sequence[Compared], rows: int, worth: float) -> bool:
    few = sum(shape.count * _seconds_recorded(shape.few, rows, shape.width) for shape in shapes)
    many = sum(shape.count * _seconds_recorded(shape.many, rows, shape.width) for shape in shapes)
    return few > worth * many


def _ends_in_loops(shape: Compared) -> bool:
    """Whether a step is recorded whichever form it takes."""
    return _are_loops(shape.few) and _are_loops(shape.many)


def _are_loops(projections: Sequence[Projection]) -> bool:
    return all(isinstance(projection, GridProjection | TileProjection) for projection in projections)


def _seconds(projections: Sequence[Projection], rows: int, width: int) -> float:
    """Of one product, in the shortest of a few runs: what else the machine does only makes them longer.

    One matrix after another, as in a step, because one that was just multiplied by lies in a cache.
    """
    x = torch.zeros(rows, width)
    return min(_timed(lambda: [projection(x) for projection in projections]) for _ in range(_RUNS)) / len(projections)


def _seconds_recorded(projections: Sequence[Projection], rows: int, width: int) -> float:
    """Likewise, as steps of few rows run: recorded where they are loops."""
    if rows > FEW_ROWS or not _are_loops(projections):
        return _seconds(projections, rows, width)
    from services.gpu_worker.cpu_loops.recording import record  # only where there is numba
    from services.gpu_worker.cpu_loops.team import TEAM

    assert TEAM is not None
    x = torch.zeros(rows, width)
    recording, _ = record(TEAM, lambda: [projection(x) for projection in projections])
    return min(_timed(recording.replay) for _ in range(_RUNS)) / len(projections)


def _timed(run: Callable[[], object]) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin
