"""gpu_worker: runs a list of loops one after the other within one parallel region.

To wake the other threads and to put them to sleep again costs some ten microseconds; a decode step has hundreds of
loops. Between two of them the threads meet: each counts itself as arrived, and looks at the number until all are
there. One that has looked for long lets other processes have its core: the thread that it waits for may be one of them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.extending import intrinsic

from services.gpu_worker.cpu_loops.jit import compiled, int64s, integers, loop, num_threads
from services.gpu_worker.cpu_loops.vectors import I8, I64

_LOOKS = 2000  # some ten microseconds

_give_way = types.ExternalFunction("sched_yield", types.int32())


@intrinsic  # type: ignore[untyped-decorator]
def _call_loop(_typing: object, address: object, arguments: object) -> object:
    """Calls the loop at an address."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        pointer = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer])
        loop_at = builder.inttoptr(values[0], kind.as_pointer())
        builder.call(loop_at, [builder.inttoptr(values[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _arrive(_typing: object, address: object) -> object:
    """Adds one to the int64 at an address; what this thread has written before is seen by whoever sees that."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        builder.atomic_rmw("add", builder.inttoptr(values[0], I64.as_pointer()), I64(1), "release")
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _num_arrived(_typing: object, address: object) -> object:
    """The int64 at an address, and with it what those have written who added to it."""

    def generate(_context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        return builder.load_atomic(builder.inttoptr(values[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@compiled
def _wait_for_all(arrived: int, number: int) -> None:
    _arrive(arrived)
    looks = 0
    while _num_arrived(arrived) < number:
        looks += 1
        if looks > _LOOKS:
            _give_way()


@loop
def PROGRAM(pointer: Any) -> None:  # noqa: N802
    """Runs [count, 2] int64: the address of a loop, and of its arguments. `arrived`: of an int64 that is 0."""
    instructions, count, arrived = integers(pointer, 3)
    lines, threads = int64s(instructions, 2 * count), num_threads()
    for i in range(count):
        _call_loop(lines[2 * i], lines[2 * i + 1])
        _wait_for_all(arrived, (i + 1) * threads)
