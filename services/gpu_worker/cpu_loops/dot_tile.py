"""gpu_worker: the innermost loop of a product with codes, made of the vector instructions that processors have for it.

A tile is 16 rows of a matrix, times up to 4 rows of inputs. Of each group of 32 inputs

    codes      u8 [8, 16, 4]    quad by quad: 4 neighbouring codes of each of the 16 rows
    inputs     i8 [2, 32]       high and low parts of rounded inputs, one factor for the group; or i16 [32], whole
    sum_r      i32 [16]         += codes * inputs
    out        f32 [16]         += scale * factor * sum_r + minimum * factor * (sum of the inputs)

so that the 16 sums lie side by side in registers and never have to be added up across them. A compiler does not find
this form in a plain loop; it is put together here from LLVM's vector operations. The integer sums are exact.

    avx512vnni    16 rows at once; VPDPBUSD adds four products of bytes to 32 bits
    avxvnni       the same, 8 rows after the other
    avx2          8 rows after the other. Codes of 4 bits: pairs of products of bytes are added up in 16 bits, which all
                  32 of a group fit (8 * 2 * 15 * 127 < 2^15). Codes of 8 bits do not: they are widened, and multiplied
                  by whole inputs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.extending import intrinsic

from services.gpu_worker.cpu_loops.vectors import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    call,
    element,
    in_each_case,
    load,
    splat,
    store,
)

TILE_COLUMNS = 16
"""Rows of the matrix, columns of the result."""

TILE_ROWS = 4
"""Most rows of inputs."""

_QUADS = 8
_SIGN = 128  # 8-bit codes are signed numbers moved up by it


def dot_instructions() -> str | None:
    """What the tile is made of on this processor: "avx512vnni", "avxvnni" or "avx2"; None: it has none of them."""
    features = llvmlite.binding.get_host_cpu_features()
    has_halves = features.get("f16c", False)
    return next((name for name in ("avx512vnni", "avxvnni", "avx2") if has_halves and features.get(name, False)), None)


def takes_whole_inputs(num_bits: int) -> bool:
    """Whether the tile wants inputs of 16 bits, those of a quad in the order 0, 2, 1, 3, and not in two parts of 8."""
    return num_bits == 8 and dot_instructions() == "avx2"


def goes_by_groups() -> bool:
    """Whether many rows go through `group_sums`, and not by fours through tiles."""
    return dot_instructions() == "avx2"


@intrinsic  # type: ignore[untyped-decorator]
def dot_tile(
    _typing: object, num_bits: object, num_rows: object, codes: object, scales: object, inputs: object,
    factors: object, sums: object, groups: object, out: object, stride: object,
) -> object:  # fmt: skip
    """Computes a tile. All are int64, addresses or numbers.

    Args:
        num_bits: 4 or 8.
        num_rows: 1, 2 or `TILE_ROWS`.
        codes: [groups, 8, 16, 4] of num_bits each; of 4 bits two quads in 64 bytes, the first in the low halves.
        scales: [groups, 16] float16; of 4 bits [groups, 2, 16], scales and minimums.
        inputs: [num_rows, groups, 2, 32] int8, or [num_rows, groups, 32] int16 (see `takes_whole_inputs`).
        factors: [num_rows, groups] float32.
        sums: [num_rows, groups] int32, of the whole inputs.
        groups: how many.
        out: [16] float32.
        stride: how many numbers further the next row of it is.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        instructions = dot_instructions()
        lanes = TILE_COLUMNS if instructions == "avx512vnni" else TILE_COLUMNS // 2

        def compute(bits: int, rows: int) -> None:
            for first in range(0, TILE_COLUMNS, lanes):
                _KINDS[instructions, bits](builder, bits, rows, _Places(*values[2:]), lanes, first).generate()

        in_each_case(builder, zip(values, ((4, 8), (1, 2, TILE_ROWS)), strict=False), compute)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


@dataclass(frozen=True, slots=True)
class _Places:
    """Arguments of `dot_tile`."""

    codes: ir.Value
    scales: ir.Value
    inputs: ir.Value
    factors: ir.Value
    sums: ir.Value
    groups: ir.Value
    out: ir.Value
    stride: ir.Value


@dataclass(frozen=True, slots=True)
class _Tile(ABC):
    """Writes the code of one kind of tile, or of a half of its columns.

    Attributes:
        bits: of a code.
        rows: of inputs.
        at: where everything lies.
        lanes: how many columns.
        first: of the columns.
    """

    builder: ir.IRBuilder
    bits: int
    rows: int
    at: _Places
    lanes: int
    first: int

    @property
    def _sums(self) -> ir.VectorType:
        return ir.VectorType(I32, self.lanes)

    @property
    def _result(self) -> ir.VectorType:
        return ir.VectorType(F32, self.lanes)

    @abstractmethod
    def _dots(self, quads: list[ir.Value], inputs: ir.Value, start: ir.Value) -> ir.Value:
        """[lanes] i32: the products of a group's codes and one row's inputs, added up.

        Args:
            quads: the codes, 8 times [lanes, 4] u8, as [lanes] i32.
            inputs: where the row's inputs of the group lie.
            start: i32, what else is added.
        """

    def generate(self) -> None:
        """Writes it."""
        builder, at = self.builder, self.at
        results = [cgutils.alloca_once_value(builder, self._result([0.0] * self.lanes)) for _ in range(self.rows)]
        with cgutils.for_range(builder, at.groups, intp=I64) as loop:
            quads = self._quads(loop.index)
            scales, minimums = self._scales(loop.index)
            for row, result in enumerate(results):
                group = builder.add(builder.mul(at.groups, I64(row)), loop.index)
                factor = load(builder, element(builder, at.factors, group, 4), F32, align=4)
                total = load(builder, element(builder, at.sums, group, 4), I32, align=4)
                start = builder.mul(total, I32(-_SIGN if self.bits == 8 else 0))
                dots = self._dots(quads, element(builder, at.inputs, group, 8 * _QUADS), start)
                added = self._scaled(dots, factor, scales, builder.load(result))
                if minimums is not None:
                    moved = builder.fmul(factor, builder.sitofp(total, F32))
                    added = self._multiply_add(splat(builder, moved, self._result), minimums, added)
                builder.store(added, result)
        for row, result in enumerate(results):
            place = builder.add(at.out, builder.add(builder.mul(at.stride, I64(4 * row)), I64(4 * self.first)))
            store(builder, builder.load(result), place, align=4)

    def _quads(self, group: ir.Value) -> list[ir.Value]:
        """The codes of a group: 8 times [lanes, 4] u8."""
        builder, count = self.builder, 4 * self.lanes
        kind = ir.VectorType(I8, count)
        quads: list[ir.Value] = []
        for line in range(self.bits):
            start = element(builder, self.at.codes, group, 64 * self.bits)
            codes = load(builder, builder.add(start, I64(64 * line + 4 * self.first)), kind, align=count)
            if self.bits == 8:
                quads.append(codes)
            else:
                quads += [builder.and_(codes, kind([15] * count)), builder.lshr(codes, kind([4] * count))]
        return [builder.bitcast(quad, self._sums) for quad in quads]

    def _scales(self, group: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        width = 2 * TILE_COLUMNS
        if self.bits == 8:
            return self._halves(element(self.builder, self.at.scales, group, width)), None
        place = element(self.builder, self.at.scales, group, 2 * width)
        return self._halves(place), self._halves(self.builder.add(place, I64(width)))

    def _halves(self, place: ir.Value) -> ir.Value:
        """[lanes] of the 16 float16 there."""
        place = self.builder.add(place, I64(2 * self.first))
        halves = load(self.builder, place, ir.VectorType(F16, self.lanes), align=2 * self.lanes)
        return self.builder.fpext(halves, self._result)

    def _scaled(self, dots: ir.Value, factor: ir.Value, scales: ir.Value, added: ir.Value) -> ir.Value:
        builder = self.builder
        numbers = builder.fmul(builder.sitofp(dots, self._result), splat(builder, factor, self._result))
        return self._multiply_add(numbers, scales, added)

    def _multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        product = self.builder.fmul(a, b, flags=("contract",))
        return self.builder.fadd(product, c, flags=("contract",))

    def _pairs_added(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """[lanes] i32: the products of two neighbouring i16 of each, added."""
        return call(self.builder, "llvm.x86.avx2.pmadd.wd", self._sums, [a, b])

    def _repeated(self, place: ir.Value, index: int) -> ir.Value:
        """[lanes] i32, each the 4 bytes that lie `index` times 4 bytes further."""
        number = load(self.builder, self.builder.add(place, I64(4 * index)), I32, align=4)
        return splat(self.builder, number, self._sums)


class _FourBytes(_Tile):
    """One instruction adds four products of bytes to 32 bits."""

    __slots__ = ()

    def _dots(self, quads: list[ir.Value], inputs: ir.Value, start: ir.Value) -> ir.Value:
        builder = self.builder
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
        high, low = self._sums([0] * self.lanes), splat(builder, start, self._sums)
        for index, codes in enumerate(quads):
            high = call(builder, name, self._sums, [high, codes, self._repeated(inputs, index)])
            low = call(builder, name, self._sums, [low, codes, self._repeated(inputs, _QUADS + index)])
        return builder.add(builder.shl(high, self._sums([7] * self.lanes)), low)


class _PairsOfBytes(_Tile):
    """One instruction adds two products of bytes to 16 bits."""

    __slots__ = ()

    def _dots(self, quads: list[ir.Value], inputs: ir.Value, start: ir.Value) -> ir.Value:
        builder, count = self.builder, 2 * self.lanes
        pairs, bytes_ = ir.VectorType(I16, count), ir.VectorType(I8, 2 * count)
        dots = splat(builder, start, self._sums)
        for part, weight in enumerate((128, 1)):
            added = pairs([0] * count)
            for index, codes in enumerate(quads):
                numbers = builder.bitcast(self._repeated(inputs, _QUADS * part + index), bytes_)
                products = [builder.bitcast(codes, bytes_), numbers]
                added = builder.add(added, call(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs, products))
            dots = builder.add(dots, self._pairs_added(added, pairs([weight] * count)))
        return dots


class _Pairs(_Tile):
    """One instruction adds two products of 16 bits to 32: codes are widened, those with even places apart."""

    __slots__ = ()

    def _dots(self, quads: list[ir.Value], inputs: ir.Value, start: ir.Value) -> ir.Value:
        builder, count = self.builder, 2 * self.lanes
        pairs = ir.VectorType(I16, count)
        dots = splat(builder, start, self._sums)
        for index, codes in enumerate(quads):
            both = builder.bitcast(codes, pairs)
            even, odd = builder.and_(both, pairs([255] * count)), builder.lshr(both, pairs([8] * count))
            for place, numbers in ((2 * index, even), (2 * index + 1, odd)):
                wanted = builder.bitcast(self._repeated(inputs, place), pairs)
                dots = builder.add(dots, self._pairs_added(numbers, wanted))
        return dots


_KINDS: dict[tuple[str | None, int], type[_Tile]] = {
    ("avx512vnni", 4): _FourBytes,
    ("avx512vnni", 8): _FourBytes,
    ("avxvnni", 4): _FourBytes,
    ("avxvnni", 8): _FourBytes,
    ("avx2", 4): _PairsOfBytes,
    ("avx2", 8): _Pairs,
}
