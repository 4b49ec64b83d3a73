"""A cursor over one frame: reads a value of the kind that is expected, or refuses at its first wrong byte.

Only the kinds that messages are made of exist here: nil, boolean, integer, 64-bit float, string, bytes, and the headers
of arrays and maps. A length is held against its limit before anything is built, and the values announced by all headers
of a frame together have a limit, so a small frame cannot ask for much time or memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from services.wire.errors import ProtocolError

MAX_VALUES = 2**19  # items that the headers of one frame may announce: bounds the time of decoding it

_NIL, _FALSE, _TRUE, _FLOAT64 = 0xC0, 0xC2, 0xC3, 0xCB
_INTEGERS = {  # type byte -> (bytes that follow, signed)
    0xCC: (1, False),
    0xCD: (2, False),
    0xCE: (4, False),
    0xCF: (8, False),
    0xD0: (1, True),
    0xD1: (2, True),
    0xD2: (4, True),
    0xD3: (8, True),
}
# type byte -> bytes of the length that follows
_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_SHORT_BYTES, _MEDIUM_BYTES, _LONG_BYTES = 0xC4, 0xC5, 0xC6  # lengths of 1, 2 and 4 bytes
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_read_float64, _read_float64_at = struct.Struct(">d").unpack, struct.Struct(">d").unpack_from


class BytesRule(NamedTuple):
    """What a bytes field may hold: `least` to `most` bytes, little-endian items of `item_bytes` each.

    `is_natural`: the items are signed, and none is negative.
    """

    least: int
    most: int
    item_bytes: int
    is_natural: bool

    def allows(self, value: bytes) -> bool:
        """Whether the field may hold it."""
        least, most, item_bytes, is_natural = self
        length = len(value)
        return (
            least <= length <= most
            and not length % item_bytes
            and (not is_natural or value[item_bytes - 1 :: item_bytes].isascii())  # the sign is in an item's last byte
        )

    def check(self, value: bytes) -> None:
        """ProtocolError unless the field may hold it; says why."""
        length = len(value)
        if not self.least <= length <= self.most or length % self.item_bytes:
            raise ProtocolError(f"{length} bytes do not fit the field")
        if not self.allows(value):
            raise ProtocolError("a negative number in a column of natural ones")


class Reader:
    """Reads one frame from its first byte to its last.

    Every method raises ProtocolError when another kind of value comes next or a limit is passed, and IndexError when
    the frame has no next value.
    """

    __slots__ = ("_frame", "_position", "_values_left")

    def __init__(self, frame: bytes) -> None:
        self._frame = frame
        self._position = 0
        self._values_left = MAX_VALUES

    def nil(self) -> bool:
        """Whether nil comes next; it is consumed if so."""
        if self._frame[self._position] != _NIL:
            return False
        self._position += 1
        return True

    def boolean(self) -> bool:
        """The next value, which must be true or false."""
        kind = self._frame[self._position]
        if kind not in (_FALSE, _TRUE):
            raise _unexpected("a boolean", kind)
        self._position += 1
        return kind == _TRUE

    def integer(self, low: int, high: int) -> int:
        """The next value, which must be an integer of [low, high]."""
        kind = self._frame[self._position]
        self._position += 1
        if kind <= 0x7F:
            value = kind
        elif kind >= 0xE0:
            value = kind - 0x100
        elif kind in _INTEGERS:
            size, signed = _INTEGERS[kind]
            value = int.from_bytes(self._take(size), "big", signed=signed)
        else:
            raise _unexpected("an integer", kind)
        if not low <= value <= high:
            raise ProtocolError(f"{value} is outside [{low}, {high}]")
        return value

    def peek_integer(self, low: int, high: int) -> int:
        """The next value, which must be an integer of [low, high]; it is not consumed."""
        position = self._position
        value = self.integer(low, high)
        self._position = position
        return value

    def number(self) -> float:
        """The next value, which must be a finite float or an integer."""
        if self._frame[self._position] != _FLOAT64:
            return float(self.integer(-(2**63), 2**64 - 1))
        self._position += 1
        value: float = _read_float64(self._take(8))[0]
        if not math.isfinite(value):
            raise ProtocolError(f"{value} is not finite")
        return value

    def string(self, most: int) -> str:
        """The next value, which must be a string of at most `most` bytes of valid UTF-8."""
        kind = self._frame[self._position]
        if 0xA0 <= kind <= 0xBF:
            self._position += 1
            length = kind & 0x1F
        else:
            length = self._length(_STRINGS, "a string")
        if length > most:
            raise ProtocolError(f"string of {length} bytes, limit {most}")
        return self._take(length).decode()

    def byte_strings(self, rules: Iterable[BytesRule], values: list[Any]) -> None:
        """Appends the next values, which must be bytes that their rules allow: the same as reading them one by one.

        When one is not, those before it have been appended.
        """
        frame = self._frame
        position = self._position
        for rule in rules:
            kind = frame[position]
            if kind == _SHORT_BYTES:
                start = position + 2
                length = frame[position + 1]
            elif kind == _MEDIUM_BYTES:
                start = position + 3
                length = frame[position + 1] << 8 | frame[position + 2]
            else:
                start, length = self._long_bytes(position)
            if length > rule.most:
                raise ProtocolError(f"{length} bytes, limit {rule.most}")
            position = start + length
            if position > len(frame):
                raise ProtocolError("frame ends early")
            value = frame[start:position]
            if not rule.allows(value):
                rule.check(value)
            values.append(value)
        self._position = position

    def short_strings(self, most: int, most_bytes: int) -> list[str]:
        """An array of at most `most` strings of at most `most_bytes`: the same as reading them one by one."""
        num_strings = self.array_header(most)
        frame = self._frame
        strings: list[str] = []
        for _ in range(num_strings):
            position = self._position
            length = frame[position] - 0xA0
            if 0 <= length <= 0x1F and length <= most_bytes and position + length < len(frame):  # nearly always
                self._position = position + 1 + length
                strings.append(frame[position + 1 : position + 1 + length].decode())
            else:
                strings.append(self.string(most_bytes))
        return strings

    def number_map(self, most: int, most_bytes: int) -> dict[str, float]:
        """A map of at most `most` names of at most `most_bytes` to numbers: the same as reading them one by one."""
        num_entries = self.map_header(most)
        frame = self._frame
        num_bytes = len(frame)
        entries: dict[str, float] = {}
        for _ in range(num_entries):
            position = self._position
            kind = frame[position]
            start = position + 2 if kind == 0xD9 else position + 1
            length = frame[position + 1] if kind == 0xD9 else kind - 0xA0
            end = start + length
            is_usual = kind == 0xD9 or 0 <= length <= 0x1F
            if is_usual and length <= most_bytes and end + 9 <= num_bytes and frame[end] == _FLOAT64:  # nearly always
                name = frame[start:end].decode()
                value: float = _read_float64_at(frame, end + 1)[0]
                if not math.isfinite(value):
                    raise ProtocolError(f"{value} is not finite")
                self._position = end + 9
            else:
                name = self.string(most_bytes)
                value = self.number()
            entries[name] = value
        return entries

    def array_header(self, most: int) -> int:
        """The number of items of the array that begins here, at most `most`."""
        kind = self._frame[self._position]
        if 0x90 <= kind <= 0x9F:
            self._position += 1
            return self._announced(kind & 0x0F, most)
        return self._announced(self._length(_ARRAYS, "an array"), most)

    def map_header(self, most: int) -> int:
        """The number of entries of the map that begins here, at most `most`."""
        kind = self._frame[self._position]
        if 0x80 <= kind <= 0x8F:
            self._position += 1
            return self._announced(kind & 0x0F, most)
        return self._announced(self._length(_MAPS, "a map"), most)

    def finish(self) -> None:
        """ProtocolError unless the frame was read to its last byte."""
        if self._position != len(self._frame):
            raise ProtocolError(f"{len(self._frame) - self._position} bytes after the message")

    def _announced(self, length: int, most: int) -> int:
        if length > most:
            raise ProtocolError(f"{length} items, limit {most}")
        self._values_left -= length
        if self._values_left < 0:
            raise ProtocolError(f"more than {MAX_VALUES} values in one frame")
        return length

    def _length(self, sizes: dict[int, int], expected: str) -> int:
        kind = self._frame[self._position]
        size = sizes.get(kind)
        if size is None:
            raise _unexpected(expected, kind)
        self._position += 1
        return int.from_bytes(self._take(size), "big")

    def _long_bytes(self, position: int) -> tuple[int, int]:
        """Where the bytes whose type stands at `position` begin, and how many they are."""
        kind = self._frame[position]
        if kind != _LONG_BYTES:
            raise _unexpected("bytes", kind)
        start = position + 5
        if start > len(self._frame):
            raise ProtocolError("frame ends early")
        return start, int.from_bytes(self._frame[position + 1 : start], "big")

    def _take(self, size: int) -> bytes:
        start = self._position
        end = self._position = start + size
        if end > len(self._frame):
            raise ProtocolError("frame ends early")
        return self._frame[start:end]


def _unexpected(expected: str, kind: int) -> ProtocolError:
    return ProtocolError(f"expected {expected}, found type byte {kind:#04x}")
