"""gpu_worker: the registers for tiles of matrices that some processors have (Intel's AMX), as loops use them.

A tile register holds up to 16 lines of 64 bytes. Of each thread there are eight; here they are four sums of 16 by 16
float32, two tiles of inputs (16 rows of 32 bfloat16) and two of weights (32 inputs of 16 columns, in pairs). One
instruction adds the product of such tiles to a sum, 16,384 operations in 16 cycles: some 8 times what vector registers
do (Intel, "Architectures Software Developer's Manual", chapter on AMX).

How many lines a register has is said beforehand, for all eight at once. A process must ask Linux for them first.
"""

from __future__ import annotations

import ctypes
import functools
import platform

import llvmlite.binding
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.extending import intrinsic
from torch import Tensor

from services.gpu_worker.cpu_loops.vectors import I8, I64, call, element

TILE = 16
"""Rows, and columns, of a sum."""

PAIRS = 2
"""Most tiles of rows, and of columns, that are multiplied together."""

DEPTH = 32
"""Inputs that one instruction sums over."""

LINE_BYTES = 64
TILE_BYTES = TILE * LINE_BYTES
"""A register, as it lies in memory: 32 inputs of 16 rows, or 16 sums of them."""

_INPUTS, _WEIGHTS = 4, 6  # the first register of each; sums come first

_PALETTE = 1
SHAPES_BYTES = 64
"""Of one description of all registers."""

_WIDTHS_AT, _LINES_AT = 16, 48

_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64: arch/x86/include/uapi/asm/prctl.h


@functools.cache
def has_tiles() -> bool:
    """Whether this processor multiplies tiles of bfloat16, and the system lets this process do so."""
    features = llvmlite.binding.get_host_cpu_features()
    if platform.system() != "Linux" or not (features.get("amx-tile", False) and features.get("amx-bf16", False)):
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA)
    return refused == 0


def register_shapes() -> Tensor:
    """[17, 64] uint8: what `set_registers` is given for inputs of 1 to 16 rows in the first tile."""
    shapes = torch.zeros(TILE + 1, SHAPES_BYTES, dtype=torch.uint8)
    shapes[:, 0] = _PALETTE
    shapes[:, _WIDTHS_AT : _WIDTHS_AT + 16 : 2] = LINE_BYTES
    shapes[:, _LINES_AT : _LINES_AT + 8] = TILE
    for rows in range(1, TILE):
        for register in (0, 1, _INPUTS):  # the sums of that tile with both of the weights'
            shapes[rows, _LINES_AT + register] = rows
    return shapes


@intrinsic  # type: ignore[untyped-decorator]
def set_registers(_typing: object, shapes: object) -> object:
    """Says how many lines the registers of this thread have. `shapes`: address of a line of `register_shapes`."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        _do(builder, "ldtilecfg", _pointer(builder, values[0]))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def release_registers(_typing: object) -> object:
    """Gives them back: a thread that holds them is slower to be switched."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, _values: list[ir.Value]) -> ir.Value:
        _do(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_tiles(
    _typing: object, num_rows: object, num_columns: object, adds: object, inputs: object, inputs_step: object,
    depth_step: object, weights: object, depths: object, out: object, out_step: object,
) -> object:  # fmt: skip
    """Writes the product of rows and columns, or adds it. All but the first three are int64, addresses or numbers.

    Args:
        num_rows: tiles of rows, 1 or 2, a constant.
        num_columns: tiles of columns, 1 or 2, a constant.
        adds: 1 to add to what is there, else 0, a constant.
        inputs: [num_rows * 16, depths * 32] bfloat16; with one tile so many rows as the registers were set for.
        inputs_step: bytes from one row to the next.
        depth_step: bytes from 32 numbers of a row to the next 32.
        weights: [num_columns, depths, 16, 16, 2] bfloat16: of each pair of inputs both numbers of 16 columns.
        depths: how many times 32 inputs.
        out: [num_rows * 16, num_columns * 16] float32.
        out_step: bytes from one row of it to the next.
    """
    constants = (num_rows, num_columns, adds)
    literals = [each.literal_value for each in constants if isinstance(each, types.IntegerLiteral)]
    if len(literals) < len(constants):
        return None
    rows, columns, is_added = range(literals[0]), range(literals[1]), bool(literals[2])

    def generate(context: BaseContext, builder: ir.IRBuilder, _signature: object, values: list[ir.Value]) -> ir.Value:
        inputs, inputs_step, depth_step, weights, depths, out, out_step = values[3:]

        def sums(row: int, column: int) -> ir.Value:
            return I8(PAIRS * row + column)

        def place(start: ir.Value, step: ir.Value, tile: int, times: int) -> ir.Value:
            return builder.add(start, builder.mul(step, I64(tile * times)))

        def out_at(row: int, column: int) -> ir.Value:
            return _pointer(builder, builder.add(place(out, out_step, row, TILE), I64(LINE_BYTES * column)))

        for row in rows:
            for column in columns:
                if is_added:
                    _do(builder, "tileloadd64", sums(row, column), out_at(row, column), out_step)
                else:
                    _do(builder, "tilezero", sums(row, column))
        with cgutils.for_range(builder, depths, intp=I64) as loop:
            for row in rows:
                at = builder.add(place(inputs, inputs_step, row, TILE), builder.mul(depth_step, loop.index))
                _do(builder, "tileloadd64", I8(_INPUTS + row), _pointer(builder, at), inputs_step)
            for column in columns:
                at = element(builder, place(weights, depths, column, TILE_BYTES), loop.index, TILE_BYTES)
                _do(builder, "tileloadd64", I8(_WEIGHTS + column), _pointer(builder, at), I64(LINE_BYTES))
                for row in rows:
                    _do(builder, "tdpbf16ps", sums(row, column), I8(_INPUTS + row), I8(_WEIGHTS + column))
        for row in rows:
            for column in columns:
                _do(builder, "tilestored64", sums(row, column), out_at(row, column), out_step)
        return context.get_dummy_value()

    return types.void(*constants, *[types.int64] * 7), generate


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, I8.as_pointer())


def _do(builder: ir.IRBuilder, name: str, *values: ir.Value) -> None:
    call(builder, f"llvm.x86.{name}", ir.VoidType(), list(values))
