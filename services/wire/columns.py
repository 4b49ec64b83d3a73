"""Columns: many small numbers as one run of little-endian bytes.

A batch of N rows travels as a handful of byte strings instead of N lists: packing costs about 0.01 us a number instead
of 0.37. Every message that carries a batch is made of these; `codec` checks their lengths.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import TypeVar

from services.wire.errors import ProtocolError

Number = TypeVar("Number", int, float)

_IS_BIG_ENDIAN = sys.byteorder == "big"
_ONE = (1).to_bytes(4, "little")
REQUEST_ID_BYTES = 16


def pack_int32(values: Iterable[int]) -> bytes:
    """Packs integers of [-2**31, 2**31) as little-endian int32; OverflowError outside that range."""
    packed = array("i", values)
    if _IS_BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def plus_int32(column: bytes, number: int) -> bytes:
    """An int32 column with a number added to each item; all items of both columns are in [0, 2**31).

    As one sum of two long integers: nothing is carried from item to item, and no array has to be made.
    """
    if not number:
        return column
    sums = int.from_bytes(column, "little") + number * _ones(len(column) // 4)
    return sums.to_bytes(len(column), "little")


def all_below(column: bytes, bound: int) -> bool:
    """Whether each item of an int32 column, none of them negative, is below `bound`, 1 to 2**31.

    As one difference of two long integers: with its highest bit set an item can lend to nobody, and keeps that bit
    exactly if what is taken from it is no more than the rest.
    """
    ones = _ones(len(column) // 4)
    highest = ones << 31
    return (highest + (bound - 1) * ones - int.from_bytes(column, "little")) & highest == highest


def may_hold(column: bytes, numbers: Collection[int]) -> bool:
    """False only if no item of an int32 column is one of these numbers: they are looked for as bytes, at any place."""
    return any(number.to_bytes(4, "little") in column for number in numbers)


@lru_cache(maxsize=16)
def _ones(num_items: int) -> int:
    """An int32 column of ones, as one integer."""
    return int.from_bytes(_ONE * num_items, "little")


def unpack_int32(column: bytes) -> list[int]:
    """The integers of an int32 column; ProtocolError when the length is not a multiple of 4."""
    if _IS_BIG_ENDIAN or len(column) % 4:
        return _filled(array("i"), column).tolist()
    return array("i", column).tolist()


def pack_float32(values: Iterable[float]) -> bytes:
    """Packs numbers as little-endian float32; infinities pass."""
    return _little_endian(array("f", values)).tobytes()


def unpack_float32(column: bytes) -> list[float]:
    """The numbers of a float32 column; ProtocolError when the length is not a multiple of 4."""
    return _filled(array("f"), column).tolist()


def pack_request_ids(request_ids: Iterable[bytes]) -> bytes:
    """Joins request ids of 16 bytes each."""
    return b"".join(request_ids)


def unpack_request_ids(column: bytes) -> list[bytes]:
    """Splits a column of request ids; ProtocolError when the length is not a multiple of 16."""
    if len(column) % REQUEST_ID_BYTES:
        raise ProtocolError(f"request id column of {len(column)} bytes")
    return list(_id_struct(len(column) // REQUEST_ID_BYTES).unpack(column))


@lru_cache(maxsize=16)
def _id_struct(num_ids: int) -> Struct:
    return Struct(f"{REQUEST_ID_BYTES}s" * num_ids)


def split_by_counts(values: list[int], counts: list[int]) -> list[list[int]]:
    """Cuts `values` into runs of the given lengths; ProtocolError unless they add up exactly."""
    if len(values) == len(counts) and counts == [1] * len(counts):  # nearly always
        return [[value] for value in values]
    runs: list[list[int]] = []
    start = 0
    for count in counts:
        if count < 0:
            raise ProtocolError(f"negative count {count}")
        runs.append(values[start : start + count])
        start += count
    if start != len(values):
        raise ProtocolError(f"counts add up to {start}, column holds {len(values)}")
    return runs


def without_places(column: bytes, places: Sequence[int], item_bytes: int) -> bytes:
    """The column without its items at these places, which ascend."""
    kept = bytearray(column)
    for place in reversed(places):
        del kept[place * item_bytes : (place + 1) * item_bytes]
    return bytes(kept)


def _filled(values: array[Number], column: bytes) -> array[Number]:
    if len(column) % values.itemsize:
        raise ProtocolError(f"{len(column)} bytes are no column of {values.itemsize}-byte numbers")
    values.frombytes(column)
    return _little_endian(values)


def _little_endian(values: array[Number]) -> array[Number]:
    """The same array with its bytes turned where the machine's order is the other one."""
    if _IS_BIG_ENDIAN:
        values.byteswap()
    return values
