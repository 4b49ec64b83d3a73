"""Small messages of numbers and columns, read by the msgpack library itself and then checked.

A turn of the scheduler finds its caches cold: walking a frame value by value (`reader`) costs three times as much as
having it taken apart at once. A frame so small cannot make the library build much, so nothing is lost by checking
afterwards; whatever is not plainly right is left to the reader, which says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from services.wire.errors import ProtocolError
from services.wire.reader import BytesRule

MAX_FLAT_BYTES = 64 * 1024  # whatever such a frame says, what is built of it takes a few megabytes
MAX_FLAT_FIELDS = 64


@dataclass(frozen=True, slots=True)
class FlatField:
    """What a field may hold here: bytes by a rule, an integer of [low, high], or an empty tuple; each may be left out.

    A tuple that is not empty is the reader's affair.
    """

    rule: BytesRule | None = None
    low: int = 1
    high: int = 0
    is_tuple: bool = False


def unpack_flat(frame: bytes) -> list[Any] | None:
    """The values in a frame of at most MAX_FLAT_BYTES, tag first; None when it is no array of plain values."""
    try:
        values = msgpack.unpackb(frame, max_array_len=MAX_FLAT_FIELDS, max_map_len=0, max_str_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException):
        return None
    return values if type(values) is list else None


def flat_reader(cls: type, fields: Sequence[FlatField]) -> Callable[[list[Any]], Any]:
    """What makes a message of the values that follow the tag: exactly what the reader would, or None."""
    checks = [(field.rule, field.low, field.high, field.is_tuple) for field in fields]
    num_fields = len(checks)
    agree = cast("Callable[[object], None] | None", getattr(cls, "check", None))

    def read(values: list[Any]) -> object:
        if len(values) != num_fields:
            return None
        for place, (rule, low, high, is_tuple) in enumerate(checks):
            value = values[place]
            kind = type(value)
            if kind is bytes:
                if rule is None or not rule.allows(value):
                    return None
            elif kind is int:
                if not low <= value <= high:
                    return None
            elif is_tuple and value == []:
                values[place] = ()
            else:
                return None
        item = cls(*values)
        if agree is not None:
            try:
                agree(item)
            except ProtocolError:
                return None
        return item

    return read
