"""gpu_worker: which of 64 neighbouring tokens are probable enough, as the bits of one integer: often few are."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.extending import intrinsic

from services.gpu_worker.cpu_loops.vectors import F32, I64, load, splat

NUM_BITS = 64

_VECTOR = ir.VectorType(F32, NUM_BITS)


@intrinsic  # type: ignore[untyped-decorator]
def bits_within(_typing: object, numbers: object, less: object, least: object, end: object) -> object:
    """The bits of the tokens, [64] float32 at an address, with least <= number - less < end; a NaN's is 0."""

    def generate(_context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        less, least, end = (splat(builder, value, _VECTOR) for value in values[1:])
        numbers = builder.fsub(load(builder, values[0], _VECTOR, align=4), less)
        is_enough = builder.fcmp_ordered(">=", numbers, least)
        return builder.bitcast(builder.and_(is_enough, builder.fcmp_ordered("<", numbers, end)), I64)

    return types.int64(types.int64, types.float32, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def lowest_bit(_typing: object, bits: object) -> object:
    """The place of the lowest bit of an integer that is not 0."""

    def generate(_context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        return builder.cttz(values[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate
