"""gpu_worker: rounds 32 neighbouring inputs of a product to 15 bits, in two parts of 8, with one factor for them.

    x is about factor * (128 * high + low)

Most processors multiply numbers of 8 bits. One such part would be enough for llama.cpp's way of computing; its rounding
is what the next-token distribution then suffers from most (3e-3 nats on the demo model; two parts: see performance.md).
As a plain loop of fixed length a compiler unrolls it into single numbers, so it is put together of vectors.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.extending import intrinsic

from services.gpu_worker.cpu_loops.vectors import F32, I8, I16, I32, I64, call, load, splat, store

GROUP = 32
"""Inputs that share a factor, and codes that share a scale."""

_LARGEST = 127.0 * 128
_INFINITY = 0x7F800000  # its bits
_MOST = 2.0**127
_FLOATS, _INTEGERS, _BYTES = (ir.VectorType(kind, GROUP) for kind in (F32, I32, I8))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def round_group(
    _typing: object, part_bits: object, x: object, rounded: object, factor: object, total: object
) -> object:
    """Rounds a group. One that is not finite gets NaN for a factor, which stays NaN.

    Args:
        part_bits: 8 or 16, a constant: what becomes of the numbers.
        x: address of [32] float32.
        rounded: of [2, 32] int8: high, -127 to 127, and low, -64 to 64; or of [32] int16, 128 * high + low, those of a
            quad in the order 0, 2, 1, 3.
        factor: of a float32.
        total: of an int32, the sum of 128 * high + low.
    """
    if not isinstance(part_bits, types.IntegerLiteral):
        return None
    store_codes = _store_parts if part_bits.literal_value == 8 else _store_whole

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        x, rounded, factor, total = values[1:]
        store_codes(builder, _round(builder, x, factor, total), rounded)
        return context.get_dummy_value()

    return types.void(part_bits, *[types.int64] * 4), generate


def _store_parts(builder: ir.IRBuilder, codes: ir.Value, rounded: ir.Value) -> None:
    high = builder.ashr(builder.add(codes, _INTEGERS([64] * GROUP)), _INTEGERS([7] * GROUP))
    low = builder.sub(codes, builder.shl(high, _INTEGERS([7] * GROUP)))
    store(builder, builder.trunc(high, _BYTES), rounded)
    store(builder, builder.trunc(low, _BYTES), builder.add(rounded, I64(GROUP)))


def _store_whole(builder: ir.IRBuilder, codes: ir.Value, rounded: ir.Value) -> None:
    order = [first + place for first in range(0, GROUP, 4) for place in (0, 2, 1, 3)]
    wide = builder.trunc(codes, ir.VectorType(I16, GROUP))
    moved = builder.shuffle_vector(wide, ir.Constant(wide.type, ir.Undefined), _INTEGERS(order))
    store(builder, moved, rounded)


def _round(builder: ir.IRBuilder, x: ir.Value, factor: ir.Value, total: ir.Value) -> ir.Value:
    """The codes, [32] i32; factor and total are stored."""
    bits = load(builder, x, _INTEGERS, align=4)
    # Numbers without their signs are ordered as their bits are; infinity and NaN come last.
    sizes = builder.and_(bits, _INTEGERS([0x7FFFFFFF] * GROUP))
    most = call(builder, f"llvm.vector.reduce.umax.v{GROUP}i32", I32, [sizes])
    is_finite = builder.icmp_unsigned("<", most, I32(_INFINITY))
    largest = builder.bitcast(most, F32)
    # Of the smallest numbers it would be infinite.
    inverse = call(builder, "llvm.minnum.f32", F32, [builder.fdiv(F32(_LARGEST), largest), F32(_MOST)])
    kept = splat(builder, builder.sext(is_finite, I32), _INTEGERS)
    numbers = builder.bitcast(builder.and_(bits, kept), _FLOATS)
    nearest = call(
        builder, f"llvm.rint.v{GROUP}f32", _FLOATS, [builder.fmul(numbers, splat(builder, inverse, _FLOATS))]
    )
    codes = builder.fptosi(nearest, _INTEGERS)
    unit = builder.fmul(largest, F32(1.0 / _LARGEST))
    store(builder, builder.select(is_finite, unit, F32(math.nan)), factor, align=4)
    store(builder, call(builder, f"llvm.vector.reduce.add.v{GROUP}i32", I32, [codes]), total, align=4)
    return codes
