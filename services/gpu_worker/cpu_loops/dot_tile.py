"""gpu_worker: the innermost loop of a product with codes, made of the vector instructions that processors have for it.

A tile is 16 rows of a matrix, times up to 4 rows of inputs. Of each group of 32 inputs

    codes      u8 [8, 16, 4]    quad by quad: 4 neighbouring codes of each of the 16 rows
    inputs     i8 [2, 32]       high and low parts of rounded inputs, one factor for the group
    sum_r      i32 [16]         += codes * inputs, four products at a time (VPDPBUSD, or what AVX2 has for it)
    out        f32 [16]         += scale * factor * sum_r + minimum * factor * (sum of the inputs)

so that the 16 sums lie side by side in one register and never have to be added up across it. A compiler does not find
this form in a plain loop; it is put together here from LLVM's vector operations. The integer sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.extending import intrinsic

from services.gpu_worker.cpu_loops.vectors import F16, F32, I8, I16, I32, I64, call, element, load, splat, store

TILE_COLUMNS = 16
"""Rows of the matrix, columns of the result."""

TILE_ROWS = 4
"""Most rows of inputs."""

_BYTES = ir.VectorType(I8, 64)
_SUMS = ir.VectorType(I32, TILE_COLUMNS)
_RESULT = ir.VectorType(F32, TILE_COLUMNS)
_HALVES = ir.VectorType(F16, TILE_COLUMNS)
_QUADS = 8
_SIGN = 128  # 8-bit codes are signed numbers moved up by it


def dot_instructions() -> str | None:
    """What the tile is made of on this processor: "avx512vnni", "avxvnni" or "avx2"; None: it has none of them."""
    features = llvmlite.binding.get_host_cpu_features()
    has_halves = features.get("f16c", False)
    return next((name for name in ("avx512vnni", "avxvnni", "avx2") if has_halves and features.get(name, False)), None)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dot_tile(
    _typing: object, num_bits: object, num_rows: object, codes: object, scales: object, inputs: object,
    factors: object, sums: object, groups: object, out: object, stride: object,
) -> object:  # fmt: skip
    """Computes a tile. All but the first two are int64, addresses or numbers.

    Args:
        num_bits: 4 or 8, a constant.
        num_rows: 1 to `TILE_ROWS`, a constant.
        codes: [groups, 8, 16, 4] of num_bits each; of 4 bits two quads in 64 bytes, the first in the low halves.
        scales: [groups, 16] float16; of 4 bits [groups, 2, 16], scales and minimums.
        inputs: [num_rows, groups, 2, 32] int8.
        factors: [num_rows, groups] float32.
        sums: [num_rows, groups] int32, of the inputs, both parts together.
        groups: how many.
        out: [16] float32.
        stride: how many numbers further the next row of it is.
    """
    if not isinstance(num_bits, types.IntegerLiteral) or not isinstance(num_rows, types.IntegerLiteral):
        return None
    bits, rows = num_bits.literal_value, num_rows.literal_value

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        _Tile(builder, bits, rows, _Places(*values[2:])).generate()
        return context.get_dummy_value()

    return types.void(num_bits, num_rows, *[types.int64] * 8), generate


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
class _Tile:
    """Writes the code of one kind of tile."""

    builder: ir.IRBuilder
    bits: int
    rows: int
    at: _Places

    def generate(self) -> None:
        builder, at = self.builder, self.at
        results = [cgutils.alloca_once_value(builder, _RESULT([0.0] * TILE_COLUMNS)) for _ in range(self.rows)]
        with cgutils.for_range(builder, at.groups, intp=I64) as loop:
            quads = self._quads(loop.index)
            scales, minimums = self._scales(loop.index)
            for row, result in enumerate(results):
                group = builder.add(builder.mul(at.groups, I64(row)), loop.index)
                factor = load(builder, element(builder, at.factors, group, 4), F32, align=4)
                total = load(builder, element(builder, at.sums, group, 4), I32, align=4)
                dots = self._dots(quads, group, total)
                added = self._scaled(dots, factor, scales, builder.load(result))
                if minimums is not None:
                    moved = builder.fmul(factor, builder.sitofp(total, F32))
                    added = self._multiply_add(splat(builder, moved, _RESULT), minimums, added)
                builder.store(added, result)
        for row, result in enumerate(results):
            place = builder.add(at.out, builder.mul(at.stride, I64(4 * row)))
            store(builder, builder.load(result), place, align=4)

    def _quads(self, group: ir.Value) -> list[ir.Value]:
        """The codes of a group: 8 times [16, 4] u8."""
        builder = self.builder
        quads: list[ir.Value] = []
        for line in range(self.bits):
            place = builder.add(element(builder, self.at.codes, group, 64 * self.bits), I64(64 * line))
            codes = load(builder, place, _BYTES, align=64)
            if self.bits == 8:
                quads.append(codes)
            else:
                quads += [builder.and_(codes, _BYTES([15] * 64)), builder.lshr(codes, _BYTES([4] * 64))]
        return [builder.bitcast(quad, _SUMS) for quad in quads]

    def _scales(self, group: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        builder, width = self.builder, 2 * TILE_COLUMNS
        if self.bits == 8:
            place = element(builder, self.at.scales, group, width)
            return builder.fpext(load(builder, place, _HALVES, align=width), _RESULT), None
        place = element(builder, self.at.scales, group, 2 * width)
        scales = load(builder, place, _HALVES, align=width)
        minimums = load(builder, builder.add(place, I64(width)), _HALVES, align=width)
        return builder.fpext(scales, _RESULT), builder.fpext(minimums, _RESULT)

    def _dots(self, quads: list[ir.Value], group: ir.Value, total: ir.Value) -> ir.Value:
        """[16] i32: the products of a group's codes and one row's inputs, added up."""
        builder = self.builder
        start = builder.mul(total, I32(-_SIGN if self.bits == 8 else 0))
        high, low = _SUMS([0] * TILE_COLUMNS), splat(builder, start, _SUMS)
        for index, codes in enumerate(quads):
            place = builder.add(element(builder, self.at.inputs, group, 8 * _QUADS), I64(4 * index))
            high = _add_dots(builder, high, codes, splat(builder, load(builder, place, I32), _SUMS))
            place = builder.add(place, I64(4 * _QUADS))
            low = _add_dots(builder, low, codes, splat(builder, load(builder, place, I32), _SUMS))
        return builder.add(builder.shl(high, _SUMS([7] * TILE_COLUMNS)), low)

    def _scaled(self, dots: ir.Value, factor: ir.Value, scales: ir.Value, added: ir.Value) -> ir.Value:
        builder = self.builder
        numbers = builder.fmul(builder.sitofp(dots, _RESULT), splat(builder, factor, _RESULT))
        return self._multiply_add(numbers, scales, added)

    def _multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        product = self.builder.fmul(a, b, flags=("contract",))
        return self.builder.fadd(product, c, flags=("contract",))


def _add_dots(builder: ir.IRBuilder, dots: ir.Value, codes: ir.Value, inputs: ir.Value) -> ir.Value:
    """Adds to each of 16 i32 the four products of its bytes: codes unsigned, inputs signed."""
    instructions = dot_instructions()
    if instructions == "avx512vnni":
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", _SUMS, [dots, codes, inputs])
    nothing = ir.Constant(_SUMS, ir.Undefined)
    halves = []
    for lanes in (range(8), range(8, 16)):
        index = ir.VectorType(I32, 8)(list(lanes))
        half = [builder.shuffle_vector(vector, nothing, index) for vector in (dots, codes, inputs)]
        halves.append(_half_dots(builder, half, instructions == "avxvnni"))
    return builder.shuffle_vector(*halves, ir.VectorType(I32, TILE_COLUMNS)(list(range(TILE_COLUMNS))))


def _half_dots(builder: ir.IRBuilder, half: list[ir.Value], has_dots: bool) -> ir.Value:
    """The same of 8. Without an instruction for it pairs are added in 16 bits, which a code of 8 bits could overflow:
    it is taken apart into two of 4 bits before.
    """
    dots, codes, inputs = half
    kind = ir.VectorType(I32, 8)
    if has_dots:
        return call(builder, "llvm.x86.avx512.vpdpbusd.256", kind, half)
    quads, pairs = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
    bytes_, numbers = builder.bitcast(codes, quads), builder.bitcast(inputs, quads)
    ones = pairs([1] * 16)
    for shift in (0, 4):
        part = builder.and_(builder.lshr(bytes_, quads([shift] * 32)), quads([15] * 32))
        sums = call(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs, [part, numbers])
        fours = call(builder, "llvm.x86.avx2.pmadd.wd", kind, [sums, ones])
        dots = builder.add(dots, builder.shl(fours, kind([shift] * 8)))
    return dots
