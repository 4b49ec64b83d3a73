"""Messages of numbers, columns and texts, checked all fields at once instead of one by one.

A turn of a busy process finds its caches cold: what counts is how much code is touched. So a small frame is taken apart
by the msgpack library itself, and its values are checked side by side; it cannot make the library build much, so
nothing is lost by checking afterwards. What a process sends is checked in the same way. Whatever is not plainly right
is left to the fields one by one (`reader`, `forms`), which say what is wrong with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import msgpack

from services.wire.errors import ProtocolError
from services.wire.reader import BytesRule

MAX_FLAT_BYTES = 64 * 1024  # whatever such a frame says, what is built of it takes a few megabytes
MAX_FLAT_FIELDS = 64
MAX_FLAT_STRINGS = 8192
_INT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class FlatField:
    """What a field may hold here: bytes by a rule, an integer of [low, high], strings, or an empty tuple.

    With `most_bytes` it is a tuple of at most `most` strings of so many bytes each; without any of these a tuple that
    is empty. Another tuple is the reader's affair.
    """

    rule: BytesRule | None = None
    limits: tuple[int, int] | None = None
    most: int = 0
    most_bytes: int = 0

    @property
    def kind(self) -> type:
        """Of its values."""
        if self.rule is not None:
            return bytes
        return tuple if self.limits is None else int

    @property
    def is_natural(self) -> bool:
        """Whether it is a column without negative numbers; only int32 columns are."""
        is_natural = self.rule is not None and self.rule.is_natural
        assert not is_natural or (self.rule is not None and self.rule.item_bytes == _INT32_BYTES)
        return is_natural


Check = Callable[[Sequence[Any]], bool]
"""Whether the values of all fields are plainly right. Tuples are tuples."""


def flat_check(fields: Sequence[FlatField]) -> Check:
    """The check of a message with these fields: never true where the fields one by one would refuse something."""
    kinds = [field.kind for field in fields]
    sizes = [(place, *field.rule[:3]) for place, field in enumerate(fields) if field.rule is not None]
    numbers = [(place, *field.limits) for place, field in enumerate(fields) if field.limits is not None]
    tuples = [(place, field.most, field.most_bytes) for place, field in enumerate(fields) if field.kind is tuple]
    naturals = _picker([place for place, field in enumerate(fields) if field.is_natural])

    def is_plain(values: Sequence[Any]) -> bool:
        if list(map(type, values)) != kinds:
            return False
        for place, least, most, item_bytes in sizes:
            num_bytes = len(values[place])
            if num_bytes < least or num_bytes > most or num_bytes % item_bytes:
                return False
        for place, low, high in numbers:
            if not low <= values[place] <= high:
                return False
        for place, most, most_bytes in tuples:
            if values[place] and not _are_strings(values[place], most, most_bytes):
                return False
        # The sign of a number is in its last byte.
        return b"".join(naturals(values))[_INT32_BYTES - 1 :: _INT32_BYTES].isascii()

    return is_plain


def _are_strings(values: tuple[Any, ...], most: int, most_bytes: int) -> bool:
    """Whether there are so few and each is so short, counting four bytes a character."""
    return len(values) <= most and set(map(type, values)) == {str} and 4 * max(map(len, values)) <= most_bytes


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[bytes]]:
    """What takes the values at these places."""
    if not places:
        return lambda values: ()
    if len(places) == 1:
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places)


def flat_reader(cls: type, fields: Sequence[FlatField]) -> Callable[[bytes], Any]:
    """What makes a message of a frame of at most MAX_FLAT_BYTES, tag first: exactly what the reader would, or None."""
    is_plain = flat_check(fields)
    tuple_places = [1 + place for place, field in enumerate(fields) if field.kind is tuple]
    has_strings = any(field.most_bytes for field in fields)
    limits = {
        "max_array_len": MAX_FLAT_STRINGS if has_strings else MAX_FLAT_FIELDS,
        "max_str_len": MAX_FLAT_BYTES if has_strings else 0,
    }
    num_values = 1 + len(fields)
    # A frozen dataclass's own __init__ looks each of these up by name; nothing else happens in a message's.
    setters = [getattr(cls, field.name).__set__ for field in dataclasses.fields(cls)]
    new: Callable[[type], object] = object.__new__
    agree: Callable[[object], None] | None = getattr(cls, "check", None)

    def read(frame: bytes) -> object:
        try:
            values = msgpack.unpackb(frame, max_map_len=0, max_ext_len=0, **limits)
        except (ValueError, msgpack.UnpackException):
            return None
        if type(values) is not list or len(values) != num_values:
            return None
        for place in tuple_places:
            if type(values[place]) is list:
                values[place] = tuple(values[place])
        del values[0]
        if not is_plain(values):
            return None
        item = new(cls)
        for put, value in zip(setters, values, strict=True):
            put(item, value)
        if agree is not None:
            try:
                agree(item)
            except ProtocolError:
                return None
        return item

    return read
