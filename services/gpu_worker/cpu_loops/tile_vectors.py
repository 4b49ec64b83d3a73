"""gpu_worker: what attention on tiles does beside their products (see `tile_attention_loop`), in vectors of 16.

Of a tile's 16 by 16 numbers of 32 bits rows become columns; scores become weights. A row of scores holds those of 16
queries for one key, so that a query has a lane of its own and nothing is ever added up across a vector.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.extending import intrinsic

from services.gpu_worker.cpu_loops.head_vectors import LANES, pool_vector
from services.gpu_worker.cpu_loops.tile_registers import LINE_BYTES
from services.gpu_worker.cpu_loops.vectors import (
    F32,
    I16,
    I32,
    I64,
    call,
    element,
    load,
    rounded_bits,
    splat,
    store,
)

SCORES_STEP = 2 * LINE_BYTES
"""Bytes from the scores (or sums) of one key (or dimension) to those of the next: two tiles of queries side by side."""

STATE_BYTES = 3 * LINE_BYTES
"""Of 16 queries: the largest score so far, the sum of weights, and what sums before it have to be multiplied by."""

_VECTOR, _WHOLE = (ir.VectorType(kind, LANES) for kind in (F32, I32))
_FUSED = ("contract",)
_LOG2_E = 1.4426950408889634
_LEAST = -126.0  # powers of two below are not normal numbers
_POWERS = (0.0096181291, 0.0555041087, 0.2402265070, 0.6931471806, 1.0)  # Taylor's series of 2^x; 4e-5 off at 1/2


@intrinsic  # type: ignore[untyped-decorator]
def turn_queries(_typing: object, target: object, queries: object, step: object, count: object) -> object:
    """Lays out 32 numbers of each of 16 queries as weights of `multiply_tiles`: [16 pairs, 16 queries, 2] bfloat16.

    Args:
        target: its address.
        queries: address of the first query's float32 numbers.
        step: bytes to those of the next.
        count: how many there are; the others are zero.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        target, queries, step, count = values
        wide = ir.VectorType(F32, 2 * LANES)
        lines = []
        for i in range(LANES):
            place = builder.add(queries, builder.mul(step, I64(i)))
            is_there = builder.icmp_signed("<", I64(i), count)
            at = builder.select(is_there, place, target)  # some readable place
            numbers = builder.select(is_there, load(builder, at, wide, align=4), wide([0.0] * (2 * LANES)))
            lines.append(builder.bitcast(rounded_bits(builder, numbers), _WHOLE))
        _store_lines(builder, target, _turned(builder, lines))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic  # type: ignore[untyped-decorator]
def turn_values(_typing: object, target: object, places: object, offset: object, bits: object) -> object:
    """Lays out 16 dimensions of the values of 32 tokens as inputs of `multiply_tiles`: [16, 32] bfloat16.

    Args:
        target: its address.
        places: address of [32] int64, where the values of each token lie.
        offset: bytes from there to the first of the 16 numbers.
        bits: of a number: 32, or 16 of half precision.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        target, places, offset, bits = values

        def turn(width: int) -> None:
            def rounded(token: int) -> ir.Value:
                start = builder.add(load(builder, element(builder, places, I64(token), 8), I64, align=8), offset)
                halves = rounded_bits(builder, pool_vector(builder, start, I64(0), width, LANES))
                return builder.zext(halves, _WHOLE)

            shift = _WHOLE([16] * LANES)
            pairs = [
                builder.or_(rounded(token), builder.shl(rounded(token + 1), shift)) for token in range(0, 2 * LANES, 2)
            ]
            _store_lines(builder, target, _turned(builder, pairs))

        _in_either_width(builder, bits, turn)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic  # type: ignore[untyped-decorator]
def round_key(_typing: object, target: object, key: object, bits: object) -> object:
    """Rounds 32 numbers of so many bits (32, or 16 of half precision) to bfloat16."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        target, key, bits = values

        def round_(width: int) -> None:
            for half in range(2):
                rounded = rounded_bits(builder, pool_vector(builder, key, I64(half), width, LANES))
                store(builder, rounded, builder.add(target, I64(2 * LANES * half)), align=2)

        _in_either_width(builder, bits, round_)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic  # type: ignore[untyped-decorator]
def weigh_keys(_typing: object, scores: object, count: object, weights: object, state: object, scale: object) -> object:
    """Turns scores of 16 queries into weights: exp(scale * score) by that of the largest one so far.

    Args:
        scores: address of [count, 16] float32, rows `SCORES_STEP` apart.
        count: how many keys, even.
        weights: of [count / 2, 16, 2] bfloat16, to be written.
        state: see `STATE_BYTES`; brought up to date.
        scale: float32.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        scores, count, weights, state, scale = values

        def state_at(part: int) -> ir.Value:
            return builder.add(state, I64(LINE_BYTES * part))

        factor = splat(builder, builder.fmul(scale, F32(_LOG2_E)), _VECTOR)
        before = load(builder, state_at(0), _VECTOR, align=4)
        largest = _largest(builder, scores, count, before)
        moved = builder.fmul(largest, factor)
        fall = _power_of_two(builder, builder.fsub(builder.fmul(before, factor), moved))
        total = cgutils.alloca_once_value(builder, builder.fmul(load(builder, state_at(1), _VECTOR, align=4), fall))
        half, upper = _WHOLE([0x8000] * LANES), _WHOLE([0xFFFF0000] * LANES)
        with cgutils.for_range(builder, builder.udiv(count, I64(2)), intp=I64) as loop:
            row = element(builder, scores, loop.index, 2 * SCORES_STEP)
            bits = []
            for place in (row, builder.add(row, I64(SCORES_STEP))):
                product = builder.fmul(load(builder, place, _VECTOR, align=4), factor, flags=_FUSED)
                weight = _power_of_two(builder, builder.fsub(product, moved, flags=_FUSED))
                builder.store(builder.fadd(builder.load(total), weight), total)
                bits.append(builder.add(builder.bitcast(weight, _WHOLE), half))  # to the nearest bfloat16
            pair = builder.or_(builder.lshr(bits[0], _WHOLE([16] * LANES)), builder.and_(bits[1], upper))
            store(builder, pair, element(builder, weights, loop.index, LINE_BYTES), align=4)
        store(builder, largest, state_at(0), align=4)
        store(builder, builder.load(total), state_at(1), align=4)
        store(builder, fall, state_at(2), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def rescale_sums(_typing: object, state: object, sums: object, dim: object) -> object:
    """Multiplies sums of 16 queries ([dim, 16] float32, rows `SCORES_STEP` apart) by what their state says."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        state, sums, dim = values
        fall = load(builder, builder.add(state, I64(2 * LINE_BYTES)), _VECTOR, align=4)
        changes = builder.bitcast(builder.fcmp_unordered("!=", fall, _VECTOR([1.0] * LANES)), I16)
        with (
            builder.if_then(builder.icmp_unsigned("!=", changes, I16(0))),  # seldom, behind the first keys
            cgutils.for_range(builder, dim, intp=I64) as loop,
        ):
            place = element(builder, sums, loop.index, SCORES_STEP)
            store(builder, builder.fmul(load(builder, place, _VECTOR, align=4), fall), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_turned(_typing: object, out: object, step: object, count: object, sums: object, state: object) -> object:
    """Divides 16 dimensions of the sums of 16 queries by the sums of their weights, and writes those of each query.

    Args:
        out: address of the first query's [16] float32.
        step: bytes to those of the next query.
        count: how many queries there are.
        sums: of [16, 16] float32, rows `SCORES_STEP` apart.
        state: see `STATE_BYTES`.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        out, step, count, sums, state = values
        total = load(builder, builder.add(state, I64(LINE_BYTES)), _VECTOR, align=4)
        lines = [
            builder.fdiv(load(builder, builder.add(sums, I64(SCORES_STEP * i)), _VECTOR, align=4), total)
            for i in range(LANES)
        ]
        for i, line in enumerate(_turned(builder, lines)):
            with builder.if_then(builder.icmp_signed("<", I64(i), count)):
                store(builder, line, builder.add(out, builder.mul(step, I64(i))), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _largest(builder: ir.IRBuilder, scores: ir.Value, count: ir.Value, before: ir.Value) -> ir.Value:
    """Of each lane the largest of what was before and [count] scores; NaN is not looked at, its weight will be NaN."""
    most = [cgutils.alloca_once_value(builder, before) for _ in range(2)]
    with cgutils.for_range(builder, builder.udiv(count, I64(2)), intp=I64) as loop:
        row = element(builder, scores, loop.index, 2 * SCORES_STEP)
        for held, place in zip(most, (row, builder.add(row, I64(SCORES_STEP))), strict=True):
            builder.store(_larger(builder, builder.load(held), load(builder, place, _VECTOR, align=4)), held)
    return _larger(builder, *map(builder.load, most))


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


def _power_of_two(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2^x for x <= 0, 2^-126 at least; NaN of NaN. As good as weights need that are rounded to 8 bits."""
    least = _VECTOR([_LEAST] * LANES)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    whole = call(builder, f"llvm.rint.v{LANES}f32", _VECTOR, [x])
    rest = builder.fsub(x, whole)
    power = _VECTOR([_POWERS[0]] * LANES)
    for factor in _POWERS[1:]:
        product = builder.fmul(power, rest, flags=_FUSED)
        power = builder.fadd(product, _VECTOR([factor] * LANES), flags=_FUSED)
    all_lanes, as_set = I16(-1), I32(4)  # rounded as the processor is set to
    return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", _VECTOR, [power, whole, power, all_lanes, as_set])


def _turned(builder: ir.IRBuilder, lines: list[ir.Value]) -> list[ir.Value]:
    """Rows of 16 vectors of 16 numbers as columns: blocks of 8, 4, 2 and 1 change places across the diagonal."""
    for size in (8, 4, 2, 1):
        upper, lower = (
            ir.VectorType(I32, LANES)([first(lane, size) for lane in range(LANES)]) for first in (_upper, _lower)
        )
        turned = list(lines)
        for i in range(LANES):
            if not i & size:
                pair = lines[i], lines[i | size]
                turned[i] = builder.shuffle_vector(*pair, upper)
                turned[i | size] = builder.shuffle_vector(*pair, lower)
        lines = turned
    return lines


def _upper(lane: int, size: int) -> int:
    return LANES + lane - size if lane & size else lane


def _lower(lane: int, size: int) -> int:
    return LANES + lane if lane & size else lane + size


def _store_lines(builder: ir.IRBuilder, target: ir.Value, lines: list[ir.Value]) -> None:
    for i, line in enumerate(lines):
        store(builder, line, builder.add(target, I64(LINE_BYTES * i)), align=4)


def _in_either_width(builder: ir.IRBuilder, bits: ir.Value, generate: Callable[[int], None]) -> None:
    with builder.if_else(builder.icmp_signed("==", bits, I64(16))) as (then, otherwise):
        with then:
            generate(16)
        with otherwise:
            generate(32)
