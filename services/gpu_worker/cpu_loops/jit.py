"""gpu_worker: how a loop is compiled, and the few words in which it speaks of memory.

A loop is a function of one pointer, to 64-bit integers that say where its tensors lie and how large they are: numba
calls it without looking at a Python object. Sums may be reordered (as the kernels of torch reorder them); what a loop
computes for a row does not depend on the other rows, nor on the number of threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from services.gpu_worker.cpu_loops import keeps_compiled
from services.gpu_worker.cpu_loops.vectors import rounded_bits

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint16]

logger = logging.getLogger(__name__)

_REORDERED = {"reassoc", "nsz", "arcp", "contract", "afn"}  # all of fastmath but its promise that there is no NaN


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of loops."""
    made: Callable[..., Any] = njit(fastmath=_REORDERED, error_model="numpy", cache=keeps_compiled())(function)
    return made


def compiled_without_nan(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for what looks for the largest of numbers, none of which may be NaN."""
    made: Callable[..., Any] = njit(fastmath=_REORDERED | {"nnan"}, error_model="numpy", cache=keeps_compiled())(
        function
    )
    return made


def compiled_exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for what must be computed as it is written. (A function that does not say so takes after its caller.)"""
    made: Callable[..., Any] = njit(fastmath=False, error_model="numpy", cache=keeps_compiled())(function)
    return made


def loop(function: Callable[[Any], None]) -> int:
    """Compiles a loop, or finds it as it was compiled before; its address, for `Team.run`."""
    began = perf_counter()
    made = cfunc(types.void(types.voidptr), fastmath=_REORDERED, error_model="numpy", cache=keeps_compiled())(function)
    _KEPT.append(made)
    address: int = made.address
    if (seconds := perf_counter() - began) > _NOTICEABLE_S and not made.cache_hits:
        kept = "; the next start finds it" if keeps_compiled() else ""
        logger.info("compiled the loop %s in %.1f s%s", function.__name__, seconds, kept)
    return address


_NOTICEABLE_S = 0.3
_KEPT: list[object] = []  # the machine code lives as long as its object


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_typing: object, address: object) -> tuple[object, object]:
    def generate(_context: object, builder: ir.IRBuilder, _signature: object, arguments: list[ir.Value]) -> ir.Value:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _power_of_two(_typing: object, exponent: object) -> tuple[object, object]:
    """2^exponent, an int32 in [-126, 127], by its bits: what a vector of numbers does at once."""

    def generate(_context: object, builder: ir.IRBuilder, _signature: object, arguments: list[ir.Value]) -> ir.Value:
        whole = ir.IntType(32)
        bits = builder.shl(builder.add(arguments[0], whole(127)), whole(23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def widened(_typing: object, bits: object) -> tuple[object, object]:
    """The float32 of a bfloat16 number, which is given as its 16 bits."""

    def generate(_context: object, builder: ir.IRBuilder, _signature: object, arguments: list[ir.Value]) -> ir.Value:
        whole = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], whole), whole(16)), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator]
def rounded(_typing: object, number: object) -> tuple[object, object]:
    """The bits of the bfloat16 nearest to a float32, the even one of two; NaN stays NaN."""

    def generate(_context: object, builder: ir.IRBuilder, _signature: object, arguments: list[ir.Value]) -> ir.Value:
        return rounded_bits(builder, arguments[0])

    return types.uint16(types.float32), generate


@compiled
def integers(pointer: Any, count: int) -> Ints:
    """What a loop was given."""
    view: Ints = carray(pointer, count, np.int64)
    return view


@compiled
def int64s(address: int, count: int) -> Ints:
    """[count] int64 at an address."""
    view: Ints = carray(_pointer(address), count, np.int64)
    return view


@compiled
def floats(address: int, count: int) -> Floats:
    """[count] float32 at an address."""
    view: Floats = carray(_pointer(address), count, np.float32)
    return view


@compiled
def bfloat16s(address: int, count: int) -> Bits:
    """The bits of [count] bfloat16 at an address."""
    view: Bits = carray(_pointer(address), count, np.uint16)
    return view


@compiled
def doubles(address: int, count: int) -> npt.NDArray[np.float64]:
    """[count] float64 at an address."""
    view: npt.NDArray[np.float64] = carray(_pointer(address), count, np.float64)
    return view


@compiled
def int32s(address: int, count: int) -> npt.NDArray[np.int32]:
    """[count] int32 at an address."""
    view: npt.NDArray[np.int32] = carray(_pointer(address), count, np.int32)
    return view


@compiled
def int8s(address: int, count: int) -> npt.NDArray[np.int8]:
    """[count] int8 at an address."""
    view: npt.NDArray[np.int8] = carray(_pointer(address), count, np.int8)
    return view


thread = types.ExternalFunction("omp_get_thread_num", types.int32())
"""Which thread of the team runs this."""

num_threads = types.ExternalFunction("omp_get_num_threads", types.int32())
"""How many run it."""


@compiled
def share(count: int) -> tuple[int, int]:
    """The part [first, end) of `count` things that the calling thread does."""
    who, of = int(thread()), int(num_threads())
    return count * who // of, count * (who + 1) // of


@compiled
def exponential(x: np.float32) -> np.float32:
    """exp(x) for x <= 88; below -87 it stays at exp(-87), and what is not finite becomes NaN.

    exp(x) = 2^k * exp(r) with k the nearest integer to x / ln 2 and |r| <= ln 2 / 2; the polynomial is the one of the
    Cephes library (netlib.org/cephes, expf): within 2 units of the last place.
    """
    undefined = x - x
    x = max(x, np.float32(-87.0))
    k = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return np.float32(p * _power_of_two(np.int32(k)) + undefined)
