"""gpu_worker: the innermost loop of a product of many rows with codes, for processors with AVX2 and no VNNI.

`dot_tile` goes through all groups of 32 inputs with four rows; here all rows go through one group of 16 columns before
the next group comes, so that its codes are taken apart once for all of them. Of 4 bits a row comes once with the high
part of its inputs, and again with the low part only where it has one, without a branch in between:

    codes      u8 [8, 16, 4]    of one group, each in a byte
    inputs     i8 [rows, 32]    high or low parts
    dots_r     i16 [16, 2]      += codes * inputs: 16 bits hold them (16 * 15 * 127 < 2^15)
    sums       f32 [rows, 16]   += scale * factor_r * dots_r, and with high parts += minimum * moved_r

Products of larger codes and bytes do not fit 16 bits, so those of 8 bits are multiplied with whole inputs:

    codes      i16 [16, 16, 2]  of one group, less 128; of each quad the even ones before the odd ones
    inputs     i16 [rows, 32]   in the same order (see `takes_whole_inputs`)
    dots_r     i32 [16]         += codes * inputs
    sums       f32 [rows, 16]   += scale * factor_r * dots_r
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.extending import intrinsic

from services.gpu_worker.cpu_loops.dot_tile import TILE_COLUMNS
from services.gpu_worker.cpu_loops.vectors import F16, F32, I8, I16, I32, I64, call, element, load, splat, store

WIDE_BYTES = 1024
"""Of 32 times 16 codes once they are taken apart, at most."""

NUMBER_BYTES = 128
"""Of 16 scales and minimums."""

_LANES = 8
_HALVES = range(0, TILE_COLUMNS, _LANES)
_LINE = 64  # bytes
_SIGN = 128  # signed bytes moved up by it are unsigned
_ROWS = 4  # at once: their sums of both halves take 8 of 16 registers, codes and inputs the others
_BYTES, _PAIRS = ir.VectorType(I8, 4 * _LANES), ir.VectorType(I16, 2 * _LANES)
_SUMS, _FLOATS = ir.VectorType(I32, _LANES), ir.VectorType(F32, _LANES)
_CONTRACT = ("contract",)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_group(
    _typing: object, num_bits: object, has_minimums: object, codes: object, scales: object, inputs: object,
    factors: object, moved: object, places: object, count: object, sums: object,
) -> object:  # fmt: skip
    """Adds one group's products to the sums of some rows. All are int64, addresses or numbers, but two constants.

    Args:
        num_bits: 4 or 8, a constant.
        has_minimums: 1 or 0, a constant: whether the minimums' part is added too.
        codes: what `take_apart` made of them.
        scales: [2, 16] float32, scales and minimums.
        inputs: [count, 32], see the module.
        factors: [count] float32.
        moved: [count] float32, what minimums are multiplied by: the sum of a row's inputs.
        places: [count] int32, which row of sums each one is.
        count: how many rows.
        sums: [.., 16] float32.
    """
    if not isinstance(num_bits, types.IntegerLiteral) or not isinstance(has_minimums, types.IntegerLiteral):
        return None
    kind, has_both = _KINDS[num_bits.literal_value], bool(has_minimums.literal_value)

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        kind(builder, has_both, *values[2:]).generate()
        return context.get_dummy_value()

    return types.void(num_bits, has_minimums, *[types.int64] * 8), generate


@dataclass(frozen=True, slots=True)
class _Group(ABC):
    """Writes the code; arguments of `add_group`."""

    builder: ir.IRBuilder
    has_minimums: bool
    codes: ir.Value
    scales: ir.Value
    inputs: ir.Value
    factors: ir.Value
    moved: ir.Value
    places: ir.Value
    count: ir.Value
    sums: ir.Value

    _STEPS: ClassVar[int]  # of a group: each takes 64 bytes of codes, and 4 of inputs
    _DOTS: ClassVar[ir.VectorType]  # sums of the products of a row and half of the columns

    @abstractmethod
    def _products(self, codes: ir.Value, inputs: ir.Value) -> ir.Value:
        """Of 32 bytes of each, as `_DOTS`."""

    @abstractmethod
    def _wide(self, dots: ir.Value) -> ir.Value:
        """[8] i32."""

    def generate(self) -> None:
        """Writes it: rows by fours, then two, then one."""
        builder = self.builder
        with cgutils.for_range(builder, builder.lshr(self.count, I64(2)), intp=I64) as loop:
            self._add_rows(builder.shl(loop.index, I64(2)), _ROWS)
        for rows in (2, 1):
            with builder.if_then(builder.icmp_signed("!=", builder.and_(self.count, I64(rows)), I64(0))):
                self._add_rows(builder.and_(self.count, I64(-2 * rows)), rows)

    def _add_rows(self, first: ir.Value, rows: int) -> None:
        builder = self.builder
        numbers = [builder.add(first, I64(row)) for row in range(rows)]
        for row, dots in zip(numbers, self._dots(first, rows), strict=True):
            place = builder.sext(load(builder, element(builder, self.places, row, 4), I32, align=4), I64)
            sums = element(builder, self.sums, place, 4 * TILE_COLUMNS)
            factor = self._repeated_float(self.factors, row)
            moved = self._repeated_float(self.moved, row) if self.has_minimums else None
            for start, half in zip(_HALVES, dots, strict=True):
                self._add(half, factor, moved, start, builder.add(sums, I64(4 * start)))

    def _dots(self, first: ir.Value, rows: int) -> list[list[ir.Value]]:
        """[rows][halves]: products of codes and inputs, added up."""
        builder, row_bytes = self.builder, 4 * self._STEPS
        inputs = element(builder, self.inputs, first, row_bytes)
        dots: list[list[ir.Value]] = [[self._DOTS([0] * self._DOTS.count)] * len(_HALVES) for _ in range(rows)]
        for step in range(self._STEPS):
            at = builder.add(self.codes, I64(4 * TILE_COLUMNS * step))
            codes = [load(builder, builder.add(at, I64(4 * start)), _SUMS, align=32) for start in _HALVES]
            for row in range(rows):
                number = load(builder, builder.add(inputs, I64(row_bytes * row + 4 * step)), I32, align=4)
                repeated = splat(builder, number, _SUMS)
                for half, numbers in enumerate(codes):
                    dots[row][half] = builder.add(dots[row][half], self._products(numbers, repeated))
        return dots

    def _add(self, dots: ir.Value, factor: ir.Value, moved: ir.Value | None, start: int, place: ir.Value) -> None:
        """Adds the products of one row and half of the columns to its sums."""
        builder = self.builder
        scales, minimums = (
            load(builder, builder.add(self.scales, I64(4 * (line * TILE_COLUMNS + start))), _FLOATS, align=32)
            for line in range(2)
        )
        numbers = builder.fmul(builder.sitofp(self._wide(dots), _FLOATS), scales)
        added = self._multiply_add(numbers, factor, load(builder, place, _FLOATS, align=4))
        if moved is not None:
            added = self._multiply_add(minimums, moved, added)
        store(builder, added, place, align=4)

    def _multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.builder.fadd(self.builder.fmul(a, b, flags=_CONTRACT), c, flags=_CONTRACT)

    def _repeated_float(self, start: ir.Value, index: ir.Value) -> ir.Value:
        number = load(self.builder, element(self.builder, start, index, 4), F32, align=4)
        return splat(self.builder, number, _FLOATS)


class _Nibbles(_Group):
    """Codes of 4 bits, a byte each, times parts of inputs."""

    __slots__ = ()
    _STEPS, _DOTS = 8, _PAIRS

    def _products(self, codes: ir.Value, inputs: ir.Value) -> ir.Value:
        both = [self.builder.bitcast(numbers, _BYTES) for numbers in (codes, inputs)]
        return call(self.builder, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, both)

    def _wide(self, dots: ir.Value) -> ir.Value:
        return call(self.builder, "llvm.x86.avx2.pmadd.wd", _SUMS, [dots, _PAIRS([1] * _PAIRS.count)])


class _Bytes(_Group):
    """Codes of 8 bits, 16 bits each, times whole inputs."""

    __slots__ = ()
    _STEPS, _DOTS = 16, _SUMS

    def _products(self, codes: ir.Value, inputs: ir.Value) -> ir.Value:
        both = [self.builder.bitcast(numbers, _PAIRS) for numbers in (codes, inputs)]
        return call(self.builder, "llvm.x86.avx2.pmadd.wd", _SUMS, both)

    def _wide(self, dots: ir.Value) -> ir.Value:
        return dots


_KINDS: dict[int, type[_Group]] = {4: _Nibbles, 8: _Bytes}


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def take_apart(
    _typing: object, num_bits: object, codes: object, scales: object, wide: object, numbers: object
) -> object:
    """Widens the codes of a group and 16 columns for `add_group`, and their scales and minimums to float32.

    Args:
        num_bits: 4 or 8, a constant.
        codes: address of [8, 16, 4] codes, quad by quad; of 4 bits two quads in 64 bytes, the first in the low halves.
        scales: of [16] float16, or with 4 bits [2, 16].
        wide: of room for what comes of the codes, `WIDE_BYTES` at most.
        numbers: of [2, 16] float32; of 8 bits the second line stays as it is.
    """
    if not isinstance(num_bits, types.IntegerLiteral):
        return None
    bits = num_bits.literal_value
    widen, num_scales = (_widen_nibbles, 2 * TILE_COLUMNS) if bits == 4 else (_widen_bytes, TILE_COLUMNS)

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        codes, scales, wide, numbers = values[1:]
        for line in range(bits):
            both = load(builder, builder.add(codes, I64(_LINE * line)), ir.VectorType(I8, _LINE), align=32)
            for place, part in enumerate(widen(builder, both)):
                store(builder, part, builder.add(wide, I64(_LINE * (2 * line + place))), align=32)
        halves = load(builder, scales, ir.VectorType(F16, num_scales), align=32)
        store(builder, builder.fpext(halves, ir.VectorType(F32, num_scales)), numbers, align=32)
        return context.get_dummy_value()

    return types.void(num_bits, *[types.int64] * 4), generate


def _widen_nibbles(builder: ir.IRBuilder, line: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Two quads."""
    kind = line.type
    return builder.and_(line, kind([15] * kind.count)), builder.lshr(line, kind([4] * kind.count))


def _widen_bytes(builder: ir.IRBuilder, line: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The even and the odd codes of a quad, less 128."""
    kind = ir.VectorType(I16, line.type.count // 2)
    pairs, sign = builder.bitcast(line, kind), kind([_SIGN] * kind.count)
    even, odd = builder.and_(pairs, kind([255] * kind.count)), builder.lshr(pairs, kind([8] * kind.count))
    return builder.sub(even, sign), builder.sub(odd, sign)


@intrinsic  # type: ignore[untyped-decorator]
def write_sums(_typing: object, sums: object, rows: object, addends: object, out: object, stride: object) -> object:
    """Writes sums [rows, 16] plus addends [16] to rows `stride` bytes apart, and leaves zeros; all are float32."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        sums, rows, addends, out, stride = values
        kind = ir.VectorType(F32, TILE_COLUMNS)
        added = load(builder, addends, kind, align=4)
        with cgutils.for_range(builder, rows, intp=I64) as loop:
            place = element(builder, sums, loop.index, 4 * TILE_COLUMNS)
            result = builder.fadd(load(builder, place, kind, align=4), added)
            store(builder, result, builder.add(out, builder.mul(stride, loop.index)), align=4)
            store(builder, kind([0.0] * TILE_COLUMNS), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic  # type: ignore[untyped-decorator]
def copy_part(_typing: object, source: object, target: object) -> object:
    """Copies 32 bytes."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        store(builder, load(builder, values[0], _BYTES), values[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_part(_typing: object, part: object) -> object:
    """int32: the sum of [32] int8 at an address."""

    def generate(_context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        count = _BYTES.count
        numbers, sums = builder.xor(load(builder, values[0], _BYTES), _BYTES([_SIGN] * count)), ir.VectorType(I64, 4)
        added = call(builder, "llvm.x86.avx2.psad.bw", sums, [numbers, _BYTES([0] * count)])
        total = call(builder, "llvm.vector.reduce.add.v4i64", I64, [added])
        return builder.sub(builder.trunc(total, I32), I32(_SIGN * count))

    return types.int32(types.int64), generate
