"""Encoding of messages: msgpack arrays `[tag, field, field, ...]`, decoded strictly and within bounds.

A message is a frozen dataclass registered under an integer tag. Its form is compiled once from the field types
(`forms`); a frame is read value by value (`reader`), so a hostile one (nested arrays, a list of a million empty lists)
is refused at its first wrong byte instead of being built in memory first. Nothing that came from a client is ever read
as a message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import msgpack

from services.wire.errors import ProtocolError
from services.wire.forms import MAX_FRAME_BYTES, fields_of
from services.wire.reader import Reader

_MAX_FIELDS = 64

M = TypeVar("M")
_tag_of: dict[type, int] = {}
_type_of: dict[int, type] = {}
_foreign_of: dict[int, tuple[int, Callable[[int], object]]] = {}


def message(tag: int, foreign: tuple[int, Callable[[int], object]] | None = None) -> Callable[[type[M]], type[M]]:
    """Registers a frozen dataclass as the message of `tag` (an integer that is never reused).

    Args:
        tag: the first item of its frames.
        foreign: for a message whose first field is the protocol version: our version, and what `decode` makes of
            another one. The rest of such a frame is not read: its shape is the other version's affair.
    """

    def register(cls: type[M]) -> type[M]:
        if tag in _type_of:
            raise ValueError(f"tag {tag} is taken by {_type_of[tag].__name__}")
        _type_of[tag], _tag_of[cls] = cls, tag
        if foreign is not None:
            _foreign_of[tag] = foreign
        return cls

    return register


def registered_messages() -> dict[int, type]:
    """Every message type by its tag."""
    return dict(_type_of)


def encode(item: object) -> bytes:
    """The frame of a registered message.

    Raises:
        TypeError: not a registered message.
        ProtocolError: a field is outside its type or bounds, or the frame would be over MAX_FRAME_BYTES: no receiver
            would take it.
    """
    tag = _tag_of.get(type(item))
    if tag is None:
        raise TypeError(f"{type(item).__name__} is not a message")
    try:
        frame = cast(bytes, msgpack.packb([tag, *fields_of(type(item)).write(item)]))
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{type(item).__name__}: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{type(item).__name__} of {len(frame)} bytes is over the frame limit")
    return frame


def decode(frame: bytes) -> object:
    """The message in a frame.

    Raises:
        ProtocolError: the frame is not exactly one of our messages, or a field is outside its bounds.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes, limit {MAX_FRAME_BYTES}")
    reader = Reader(frame)
    try:
        length = reader.array_header(_MAX_FIELDS)
        tag = reader.integer(0, 0xFFFF)
        cls = _type_of.get(tag)
        if cls is None:
            raise ProtocolError(f"unknown tag {tag}")
        foreign = _foreign_of.get(tag)
        if foreign is not None:
            our_version, make = foreign
            version = reader.peek_integer(0, 2**31 - 1)
            if version != our_version:
                return make(version)
        item = fields_of(cls).read(reader, length - 1)
        reader.finish()
    except IndexError:
        raise ProtocolError("frame ends early") from None
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a string is not UTF-8: {error.reason}") from error
    return cast(object, item)
