"""gpu_worker: what attention does with a head's numbers, in vectors, as no plain loop is compiled."""

from __future__ import annotations

import math

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
    I32,
    I64,
    call,
    element,
    in_each_case,
    load,
    rounded_bits,
    splat,
    store,
)

LANES = 16
"""A head's width must be a multiple of it."""

REGISTER = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f", False) else 8
"""Numbers that a register of this processor holds. It has 32 of 16 or 16 of 8."""

KEYS = REGISTER // 2
"""Keys that are scored together: the sums of so many for each query fit into the registers."""

QUERIES = 3
"""Most queries that they are scored for."""

VECTORS = 4
"""Registers of a head that values are added to together, for each query."""

LARGEST_HALF = 65504.0
"""The largest number of half precision."""

_WIDE = 32
_WIDTHS, _GROUPS = (_WIDE, 16), range(1, QUERIES + 1)
_LINE = 64  # bytes
_READ, _NEAR, _DATA = 0, 3, 1  # of a prefetch: what for, into which caches, what
_VECTOR = ir.VectorType(F32, LANES)
_HALVES = ir.VectorType(F16, LANES)
_SUMS = ir.VectorType(F32, REGISTER)
_FUSED = ("contract",)


def pool_vector(builder: ir.IRBuilder, start: ir.Value, index: ir.Value, bits: int, lanes: int = REGISTER) -> ir.Value:
    """So many numbers of a pool whose elements have so many bits, as float32; `index` counts such vectors."""
    place, kind = element(builder, start, index, bits // 8 * lanes), ir.VectorType(F32, lanes)
    if bits == _WIDE:
        return load(builder, place, kind, align=4)
    return builder.fpext(load(builder, place, ir.VectorType(F16, lanes), align=2), kind)


@intrinsic  # type: ignore[untyped-decorator]
def score_keys(
    _typing: object, bits: object, queries: object, count: object, query: object, keys: object, step: object,
    dim: object, out: object, out_step: object, scale: object,
) -> object:  # fmt: skip
    """Computes scale * (products of some queries with `count` neighbouring keys of a pool): [queries, count] float32.

    Each key is read once for all queries. A product's partial sums have to be added across a register, which costs as
    much as the product; of `KEYS` keys they are added together, halving twice as many numbers in each step.

    Args:
        bits: of the pool's numbers: 32, or 16 of half precision.
        queries: how many, 1 to `QUERIES`.
        count: 1 or `KEYS`.
        query: address of [queries, dim] float32.
        keys: address of the first key in the pool.
        step: bytes from one key to the next.
        dim: a multiple of `LANES`.
        out: address of [count] float32, of the first query.
        out_step: bytes from the scores of one query to those of the next.
        scale: float32.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        query, keys, step, dim, out, out_step, scale = values[3:]

        def score(width: int, heads: int, number: int) -> None:
            sums = [
                [cgutils.alloca_once_value(builder, _SUMS([0.0] * REGISTER)) for _ in range(number)]
                for _ in range(heads)
            ]
            starts = [builder.add(keys, builder.mul(step, I64(i))) for i in range(number)]
            rows = [builder.add(query, builder.mul(dim, I64(4 * head))) for head in range(heads)]
            with cgutils.for_range(builder, builder.udiv(dim, I64(REGISTER)), intp=I64) as loop:
                lefts = [load(builder, element(builder, row, loop.index, 4 * REGISTER), _SUMS, align=4) for row in rows]
                for i, start in enumerate(starts):
                    key = pool_vector(builder, start, loop.index, width)
                    for left, totals in zip(lefts, sums, strict=True):
                        product = builder.fmul(left, key, flags=_FUSED)
                        builder.store(builder.fadd(builder.load(totals[i]), product, flags=_FUSED), totals[i])
            for head, totals in enumerate(sums):
                added = _added_across(builder, [builder.load(total) for total in totals])
                place = builder.add(out, builder.mul(out_step, I64(head)))
                store(builder, builder.fmul(added, splat(builder, scale, added.type)), place, align=4)

        in_each_case(builder, zip(values, (_WIDTHS, _GROUPS, (1, KEYS)), strict=False), score)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, types.float32), generate


def _added_across(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """The sum of each vector's numbers, side by side; their number is a power of two, up to `REGISTER`."""
    number, width = len(vectors), REGISTER
    while len(vectors) > 1:
        vectors = [
            _neighbours_added(builder, vectors[i], vectors[i + 1], 2 * REGISTER) for i in range(0, len(vectors), 2)
        ]
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


@intrinsic  # type: ignore[untyped-decorator]
def add_values(
    _typing: object, bits: object, queries: object, vectors: object, total: object, total_step: object, values: object,
    step: object, count: object, weights: object, weights_step: object, ahead: object,
) -> object:  # fmt: skip
    """Adds `count` neighbouring values of a pool, each times its weight, to [queries, REGISTER * vectors] float32.

    Args:
        bits: see `score_keys`.
        queries: likewise; each has its own sums and weights.
        vectors: 1 or `VECTORS`; so many sums of a query stay in registers meanwhile.
        total: address of the first query's sums.
        total_step: bytes from these to those of the next query.
        values: address of the first value's numbers in the pool.
        step: bytes from one value to the next.
        count: how many values.
        weights: address of [count] float32, of the first query.
        weights_step: bytes from these to those of the next query.
        ahead: what lies so many bytes behind each value is asked for.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, given: list[ir.Value]) -> ir.Value:
        total, total_step, values, step, count, weights, weights_step, ahead = given[3:]

        def add(width: int, heads: int, number: int) -> None:
            starts = [builder.add(total, builder.mul(total_step, I64(head))) for head in range(heads)]
            places = [[element(builder, start, I64(i), 4 * REGISTER) for i in range(number)] for start in starts]
            sums = [
                [cgutils.alloca_once_value(builder, load(builder, place, _SUMS, align=4)) for place in row]
                for row in places
            ]
            lines = [builder.add(weights, builder.mul(weights_step, I64(head))) for head in range(heads)]
            with cgutils.for_range(builder, count, intp=I64) as loop:
                factors = [
                    splat(builder, load(builder, element(builder, line, loop.index, 4), F32, align=4), _SUMS)
                    for line in lines
                ]
                start = builder.add(values, builder.mul(step, loop.index))
                for line in range(0, width // 8 * REGISTER * number, _LINE):
                    _fetch(builder, builder.add(builder.add(start, ahead), I64(line)))
                for i in range(number):
                    value = pool_vector(builder, start, I64(i), width)
                    for factor, row in zip(factors, sums, strict=True):
                        product = builder.fmul(value, factor, flags=_FUSED)
                        builder.store(builder.fadd(builder.load(row[i]), product, flags=_FUSED), row[i])
            for row, held in zip(places, sums, strict=True):
                for place, number_held in zip(row, held, strict=True):
                    store(builder, builder.load(number_held), place, align=4)

        in_each_case(builder, zip(given, (_WIDTHS, _GROUPS, (1, VECTORS)), strict=False), add)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), generate


def _fetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    place = builder.inttoptr(address, I8.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, *map(I32, (_READ, _NEAR, _DATA))])


@intrinsic  # type: ignore[untyped-decorator]
def fetch_lines(_typing: object, start: object, step: object, count: object, width: object) -> object:
    """Asks for `count` pieces of `width` bytes, `step` bytes apart, before they are needed.

    What a processor foresees itself ends with a page of the pool; the next one lies anywhere.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        start, step, count, width = values
        with cgutils.for_range(builder, count, intp=I64) as piece:
            begin = builder.add(start, builder.mul(step, piece.index))
            with cgutils.for_range(builder, builder.udiv(width, I64(_LINE)), intp=I64) as line:
                _fetch(builder, element(builder, begin, line.index, _LINE))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


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
