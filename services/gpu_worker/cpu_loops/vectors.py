"""gpu_worker: words of LLVM's vector language that the hand-made loops share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from llvmlite import ir
from numba.core import cgutils

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    """What lies at an address (int64)."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 1) -> None:
    """Puts it there."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def element(builder: ir.IRBuilder, start: ir.Value, index: ir.Value, size: int) -> ir.Value:
    """The address of the element at `index` of an array whose elements take `size` bytes."""
    return builder.add(start, builder.mul(index, I64(size)))


def splat(builder: ir.IRBuilder, number: ir.Value, kind: ir.VectorType) -> ir.Value:
    """A vector of one number."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, I32(0))
    return builder.shuffle_vector(first, nothing, ir.VectorType(I32, kind.count)([0] * kind.count))


def call(builder: ir.IRBuilder, name: str, kind: ir.Type, values: list[ir.Value]) -> ir.Value:
    """One of LLVM's own functions."""
    function_type = ir.FunctionType(kind, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), values)


def rounded_bits(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    """The bits of the bfloat16 nearest to a float32, or to each of a vector; the even one of two; NaN stays NaN."""
    count = getattr(numbers.type, "count", None)
    whole, half = (I32, I16) if count is None else (ir.VectorType(I32, count), ir.VectorType(I16, count))

    def constant(number: int) -> ir.Constant:
        return whole(number if count is None else [number] * count)

    bits = builder.bitcast(numbers, whole)
    last_kept = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    nearest = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), last_kept), constant(16))
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    return builder.trunc(builder.select(is_nan, constant(0x7FC0), nearest), half)


def in_each_case(
    builder: ir.IRBuilder, choices: Iterable[tuple[ir.Value, Sequence[int]]], generate: Callable[..., None]
) -> None:
    """Code for every combination of what some numbers may be, of which one will run: each is unrolled for its own."""
    numbers, known = zip(*choices, strict=True)
    for case in itertools.product(*known):
        is_it = [builder.icmp_signed("==", number, I64(one)) for number, one in zip(numbers, case, strict=True)]
        with builder.if_then(functools.reduce(builder.and_, is_it)):
            generate(*case)
