"""gpu_worker: what attention of a prompt's tokens does in float32 (see `block_attention_loop`), in vectors of 16.

A vector holds a number of each of 16 queries, so that nothing is ever added up across it; keys and values come as
single numbers that are multiplied with all 16. How far 16 queries are is their state, three vectors:

    largest     the largest score so far
    total       the sum of weights, exp(score - largest)
    fall        what sums before have to be multiplied by, because a larger score was found
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.extending import intrinsic

from services.gpu_worker.cpu_loops.head_vectors import LANES, REGISTER, pool_vector
from services.gpu_worker.cpu_loops.vectors import F32, I32, I64, call, element, in_each_case, load, splat, store

LINE_BYTES = 4 * LANES
"""Of a number of each query."""

STATE_BYTES = 3 * LINE_BYTES

KEYS_TOGETHER = 6 if REGISTER < LANES else 12
"""Keys that are scored together: their sums fit into the registers, and are enough to wait for none of them."""

_DIMENSIONS_TOGETHER = (KEYS_TOGETHER, 4, 2)
_UNROLLED = 4
_VECTOR, _WHOLE = (ir.VectorType(kind, LANES) for kind in (F32, I32))
_FUSED = ("contract",)
_LEAST = -126.0  # powers of two below are not normal numbers
_POWERS = tuple(
    math.log(2) ** k / math.factorial(k) for k in range(7, -1, -1)
)  # Taylor's series of 2^x; 5e-9 off at 1/2


@intrinsic  # type: ignore[untyped-decorator]
def widen_head(_typing: object, target: object, source: object, dim: object, bits: object) -> object:
    """Copies [dim] numbers of a pool of so many bits (32, or 16 of half precision) as float32."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        target, source, dim, bits = values

        def widen(width: int) -> None:
            with cgutils.for_range(builder, builder.udiv(dim, I64(LANES)), intp=I64) as loop:
                numbers = pool_vector(builder, source, loop.index, width, LANES)
                store(builder, numbers, element(builder, target, loop.index, LINE_BYTES), align=4)

        in_each_case(builder, [(bits, (16, 32))], widen)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic  # type: ignore[untyped-decorator]
def score_block(_typing: object, keys: object, count: object, dim: object, queries: object, scores: object) -> object:
    """Computes scores [count, 16] = keys [count, dim] * queries [dim, 16], all float32 at addresses.

    Args:
        keys: of the first key.
        count: a multiple of `KEYS_TOGETHER`.
        dim: a multiple of `LANES`.
        queries: see above.
        scores: to be written.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        keys, count, dim, queries, scores = values
        key_bytes = builder.mul(dim, I64(4))
        with cgutils.for_range(builder, builder.udiv(count, I64(KEYS_TOGETHER)), intp=I64) as group:
            first = builder.mul(group.index, I64(KEYS_TOGETHER))
            at = [builder.add(keys, builder.mul(key_bytes, builder.add(first, I64(i)))) for i in range(KEYS_TOGETHER)]
            sums = [cgutils.alloca_once_value(builder, _VECTOR([0.0] * LANES)) for _ in at]
            for held in sums:
                builder.store(_VECTOR([0.0] * LANES), held)
            with cgutils.for_range(builder, builder.udiv(dim, I64(_UNROLLED)), intp=I64) as loop:
                for part in range(_UNROLLED):
                    place = builder.add(
                        element(builder, queries, loop.index, _UNROLLED * LINE_BYTES), I64(part * LINE_BYTES)
                    )
                    query = load(builder, place, _VECTOR, align=4)
                    numbers = [
                        builder.add(element(builder, start, loop.index, 4 * _UNROLLED), I64(4 * part)) for start in at
                    ]
                    _multiply_add(builder, query, numbers, sums)
            for i, held in enumerate(sums):
                store(
                    builder,
                    builder.load(held),
                    element(builder, scores, builder.add(first, I64(i)), LINE_BYTES),
                    align=4,
                )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_block(
    _typing: object, number: object, values: object, value_bytes: object, count: object, weights: object, fall: object,
    sums: object,
) -> object:  # fmt: skip
    """Computes sums [number, 16] = fall [16] * sums + the products of values [count, number] and weights [count, 16].

    Args:
        number: of dimensions, one of those that `dimensions_together` returns.
        values: address of the first value's first of these dimensions, float32.
        value_bytes: from one value to the next.
        count: how many.
        weights: address, as the others float32.
        fall: address.
        sums: address.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, given: list[ir.Value]) -> ir.Value:
        values, value_bytes, count, weights, fall, sums = given[1:]

        def add(number: int) -> None:
            places = [builder.add(sums, I64(LINE_BYTES * i)) for i in range(number)]
            factor = load(builder, fall, _VECTOR, align=4)
            held = [cgutils.alloca_once(builder, _VECTOR) for _ in places]
            for sum_, place in zip(held, places, strict=True):
                builder.store(builder.fmul(load(builder, place, _VECTOR, align=4), factor), sum_)
            with cgutils.for_range(builder, count, intp=I64) as loop:
                weight = load(builder, element(builder, weights, loop.index, LINE_BYTES), _VECTOR, align=4)
                start = builder.add(values, builder.mul(value_bytes, loop.index))
                _multiply_add(builder, weight, [builder.add(start, I64(4 * i)) for i in range(number)], held)
            for sum_, place in zip(held, places, strict=True):
                store(builder, builder.load(sum_), place, align=4)

        in_each_case(builder, [(given[0], _DIMENSIONS_TOGETHER)], add)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _multiply_add(
    builder: ir.IRBuilder, vector: ir.Value, numbers: Sequence[ir.Value], sums: Sequence[ir.Value]
) -> None:
    """Adds the vector times each of some numbers at addresses to each one's sums."""
    for place, held in zip(numbers, sums, strict=True):
        product = builder.fmul(vector, splat(builder, load(builder, place, F32, align=4), _VECTOR), flags=_FUSED)
        builder.store(builder.fadd(product, builder.load(held), flags=_FUSED), held)


@intrinsic  # type: ignore[untyped-decorator]
def weigh_block(_typing: object, scores: object, count: object, state: object) -> object:
    """Turns scores [count, 16], which are logarithms of 2, into weights in place, and brings the state up to date."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        scores, count, state = values
        largest_at, total_at, fall_at = (builder.add(state, I64(LINE_BYTES * part)) for part in range(3))
        before = load(builder, largest_at, _VECTOR, align=4)
        most = cgutils.alloca_once(builder, _VECTOR)
        builder.store(before, most)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            found = load(builder, element(builder, scores, loop.index, LINE_BYTES), _VECTOR, align=4)
            is_more = builder.fcmp_ordered(">", found, builder.load(most))  # NaN is passed over; its weight is NaN
            builder.store(builder.select(is_more, found, builder.load(most)), most)
        largest = builder.load(most)
        fall = _power_of_two(builder, builder.fsub(before, largest))
        total = cgutils.alloca_once(builder, _VECTOR)
        builder.store(builder.fmul(load(builder, total_at, _VECTOR, align=4), fall), total)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            place = element(builder, scores, loop.index, LINE_BYTES)
            weight = _power_of_two(builder, builder.fsub(load(builder, place, _VECTOR, align=4), largest))
            builder.store(builder.fadd(builder.load(total), weight), total)
            store(builder, weight, place, align=4)
        store(builder, largest, largest_at, align=4)
        store(builder, builder.load(total), total_at, align=4)
        store(builder, fall, fall_at, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def _power_of_two(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2^x for x <= 0, to the last digits of float32; 0 below 2^-126, NaN of NaN."""
    least = _VECTOR([_LEAST] * LANES)
    is_less = builder.fcmp_ordered("<", x, least)
    bounded = builder.select(is_less, least, x)
    whole = call(builder, f"llvm.rint.v{LANES}f32", _VECTOR, [bounded])
    rest = builder.fsub(bounded, whole)
    power = _VECTOR([_POWERS[0]] * LANES)
    for factor in _POWERS[1:]:
        power = builder.fadd(builder.fmul(power, rest, flags=_FUSED), _VECTOR([factor] * LANES), flags=_FUSED)
    exponent = builder.shl(builder.add(builder.fptosi(whole, _WHOLE), _WHOLE([127] * LANES)), _WHOLE([23] * LANES))
    scaled = builder.fmul(power, builder.bitcast(exponent, _VECTOR))
    return builder.select(is_less, _VECTOR([0.0] * LANES), scaled)
