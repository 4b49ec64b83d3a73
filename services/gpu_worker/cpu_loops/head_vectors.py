"""gpu_worker: the two things attention does with a head's numbers, in vectors of 16, as no plain loop is compiled."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.extending import intrinsic

from services.gpu_worker.cpu_loops.vectors import F32, I64, call, element, load, splat, store

LANES = 16
"""A head's width must be a multiple of it."""

_VECTOR = ir.VectorType(F32, LANES)
_FUSED = ("contract",)


@intrinsic  # type: ignore[untyped-decorator]
def dot(_typing: object, a: object, b: object, count: object) -> object:
    """The sum of products of [count] float32 at two addresses; `count` is a multiple of `LANES`."""

    def generate(_context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        a, b, count = values
        sums = cgutils.alloca_once_value(builder, _VECTOR([0.0] * LANES))
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES)), intp=I64) as loop:
            places = [element(builder, start, loop.index, 4 * LANES) for start in (a, b)]
            left, right = (load(builder, place, _VECTOR, align=4) for place in places)
            product = builder.fmul(left, right, flags=_FUSED)
            builder.store(builder.fadd(builder.load(sums), product, flags=_FUSED), sums)
        result = call(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", F32, [F32(0.0), builder.load(sums)])
        result.fastmath.add("reassoc")
        return result

    return types.float32(*[types.int64] * 3), generate


@intrinsic  # type: ignore[untyped-decorator]
def number_at(_typing: object, address: object) -> object:
    """The float32 at an address. (An array made for one number costs more than the number.)"""

    def generate(_context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        return load(builder, values[0], F32, align=4)

    return types.float32(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def put_number(_typing: object, address: object, number: object) -> object:
    """Puts a float32 there."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        store(builder, values[1], values[0], align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_scaled(_typing: object, total: object, addend: object, factor: object, count: object) -> object:
    """Adds factor * addend to total, [count] float32 at two addresses; `count` is a multiple of `LANES`."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        total, addend, factor, count = values
        factors = splat(builder, factor, _VECTOR)
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES)), intp=I64) as loop:
            places = [element(builder, start, loop.index, 4 * LANES) for start in (total, addend)]
            sums, added = (load(builder, place, _VECTOR, align=4) for place in places)
            product = builder.fmul(added, factors, flags=_FUSED)
            store(builder, builder.fadd(sums, product, flags=_FUSED), places[0], align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate
