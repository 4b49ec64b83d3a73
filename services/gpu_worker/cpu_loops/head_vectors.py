"""gpu_worker: what attention does with a head's numbers, in vectors of 16, as no plain loop is compiled."""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.extending import intrinsic

from services.gpu_worker.cpu_loops.vectors import F16, F32, I32, I64, call, element, load, rounded_bits, splat, store

LANES = 16
"""A head's width must be a multiple of it."""

KEYS = 8
"""Keys that are scored together."""

LARGEST_HALF = 65504.0
"""The largest number of half precision."""

_WIDE = 32
_VECTOR = ir.VectorType(F32, LANES)
_HALVES = ir.VectorType(F16, LANES)
_FUSED = ("contract",)


def _pool_vector(builder: ir.IRBuilder, start: ir.Value, index: ir.Value, bits: int) -> ir.Value:
    """16 numbers of a pool whose elements have so many bits, as float32."""
    place = element(builder, start, index, bits // 8 * LANES)
    if bits == _WIDE:
        return load(builder, place, _VECTOR, align=4)
    return builder.fpext(load(builder, place, _HALVES, align=2), _VECTOR)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score_keys(
    _typing: object, bits: object, count: object, query: object, keys: object, step: object, dim: object, out: object,
    scale: object,
) -> object:  # fmt: skip
    """Computes scale * (products of a query with `count` neighbouring keys of a pool): [count] float32.

    A product's 16 partial sums have to be added across a register, which costs as much as the product; of 8 keys they
    are added together, halving twice as many numbers in each step.

    Args:
        bits: of the pool's numbers, a constant: 32, or 16 of half precision.
        count: 1 or `KEYS`, a constant.
        query: address of [dim] float32.
        keys: address of the first key in the pool.
        step: bytes from one key to the next.
        dim: a multiple of `LANES`.
        out: address of [count] float32.
        scale: float32.
    """
    if not isinstance(bits, types.IntegerLiteral) or not isinstance(count, types.IntegerLiteral):
        return None
    width, number = bits.literal_value, count.literal_value

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        _, _, query, keys, step, dim, out, scale = values
        sums = [cgutils.alloca_once_value(builder, _VECTOR([0.0] * LANES)) for _ in range(number)]
        starts = [builder.add(keys, builder.mul(step, I64(i))) for i in range(number)]
        with cgutils.for_range(builder, builder.udiv(dim, I64(LANES)), intp=I64) as loop:
            left = load(builder, element(builder, query, loop.index, 4 * LANES), _VECTOR, align=4)
            for total, start in zip(sums, starts, strict=True):
                product = builder.fmul(left, _pool_vector(builder, start, loop.index, width), flags=_FUSED)
                builder.store(builder.fadd(builder.load(total), product, flags=_FUSED), total)
        added = _added_across(builder, [builder.load(total) for total in sums])
        store(builder, builder.fmul(added, splat(builder, scale, added.type)), out, align=4)
        return context.get_dummy_value()

    return types.void(bits, count, *[types.int64] * 5, types.float32), generate


def _added_across(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """The sum of each vector's numbers, side by side; their number is a power of two, up to `LANES`."""
    number, width = len(vectors), LANES
    while len(vectors) > 1:
        vectors = [_neighbours_added(builder, vectors[i], vectors[i + 1], 2 * LANES) for i in range(0, len(vectors), 2)]
    (together,) = vectors
    while width > number:
        together = _neighbours_added(builder, together, together, width)
        width //= 2
    return together


def _neighbours_added(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, count: int) -> ir.Value:
    """Of the first `count` numbers of a and b, one after the other, the sums of neighbours."""
    index = ir.VectorType(I32, count // 2)
    even, odd = (builder.shuffle_vector(a, b, index(list(range(first, count, 2)))) for first in (0, 1))
    return builder.fadd(even, odd)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_values(
    _typing: object, bits: object, vectors: object, total: object, values: object, step: object, count: object,
    weights: object,
) -> object:  # fmt: skip
    """Adds `count` neighbouring values of a pool, each times its weight, to [16 * vectors] float32.

    Args:
        bits: see `score_keys`.
        vectors: a constant; so many sums stay in registers meanwhile.
        total: address of the sums.
        values: address of the first value's numbers in the pool.
        step: bytes from one value to the next.
        count: how many values.
        weights: address of [count] float32.
    """
    if not isinstance(bits, types.IntegerLiteral) or not isinstance(vectors, types.IntegerLiteral):
        return None
    width, number = bits.literal_value, vectors.literal_value

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, given: list[ir.Value]) -> ir.Value:
        _, _, total, values, step, count, weights = given
        places = [element(builder, total, I64(i), 4 * LANES) for i in range(number)]
        sums = [cgutils.alloca_once_value(builder, load(builder, place, _VECTOR, align=4)) for place in places]
        with cgutils.for_range(builder, count, intp=I64) as loop:
            weight = load(builder, element(builder, weights, loop.index, 4), F32, align=4)
            factors = splat(builder, weight, _VECTOR)
            start = builder.add(values, builder.mul(step, loop.index))
            for i, held in enumerate(sums):
                product = builder.fmul(_pool_vector(builder, start, I64(i), width), factors, flags=_FUSED)
                builder.store(builder.fadd(builder.load(held), product, flags=_FUSED), held)
        for place, held in zip(places, sums, strict=True):
            store(builder, builder.load(held), place, align=4)
        return context.get_dummy_value()

    return types.void(bits, vectors, *[types.int64] * 5), generate


@intrinsic  # type: ignore[untyped-decorator]
def largest_of(_typing: object, numbers: object, count: object) -> object:
    """Of [count] float32 at an address, `count` a multiple of `LANES`; -inf of none, any number where one is NaN."""

    def generate(_context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        numbers, count = values
        most = cgutils.alloca_once_value(builder, _VECTOR([-math.inf] * LANES))
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES)), intp=I64) as loop:
            found = load(builder, element(builder, numbers, loop.index, 4 * LANES), _VECTOR, align=4)
            is_more = builder.fcmp_ordered(">", found, builder.load(most))
            builder.store(builder.select(is_more, found, builder.load(most)), most)
        return call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [builder.load(most)])

    return types.float32(types.int64, types.int64), generate


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
def store_halves(_typing: object, target: object, source: object, count: object) -> object:
    """Rounds [count] float32 to half precision, at two addresses; `count` is a multiple of `LANES`.

    What is too large becomes the largest number, as it does in a pool of 8 bits; NaN stays NaN.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        target, source, count = values
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES)), intp=I64) as loop:
            numbers = load(builder, element(builder, source, loop.index, 4 * LANES), _VECTOR, align=4)
            for sign, limit in ((">", LARGEST_HALF), ("<", -LARGEST_HALF)):
                ends = _VECTOR([limit] * LANES)
                numbers = builder.select(builder.fcmp_ordered(sign, numbers, ends), ends, numbers)
            store(builder, builder.fptrunc(numbers, _HALVES), element(builder, target, loop.index, 2 * LANES), align=2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic  # type: ignore[untyped-decorator]
def round_halves(_typing: object, target: object, source: object, count: object) -> object:
    """Rounds [count] numbers of half precision to bfloat16, at two addresses; `count` is a multiple of `LANES`."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        target, source, count = values
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES)), intp=I64) as loop:
            place = element(builder, source, loop.index, 2 * LANES)
            numbers = builder.fpext(load(builder, place, _HALVES, align=2), _VECTOR)
            store(builder, rounded_bits(builder, numbers), element(builder, target, loop.index, 2 * LANES), align=2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate
