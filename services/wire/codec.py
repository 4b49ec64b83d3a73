"""Encoding of messages: msgpack arrays `[tag, field, field, ...]`, decoded strictly and within bounds.

A message is a frozen dataclass with an integer tag (`messages`). Its form is compiled once from the field types
(`forms`); a frame is read value by value (`reader`), so a hostile one (nested arrays, a list of a million empty lists)
is refused at its first wrong byte instead of being built in memory first. Nothing that came from a client is ever read
as a message.
"""

from __future__ import annotations

from typing import cast

import msgpack

from services.wire.errors import ProtocolError
from services.wire.forms import MAX_FRAME_BYTES, fields_of
from services.wire.members import ForeignHello, Hello
from services.wire.messages import MESSAGE_TYPES, PROTOCOL_VERSION
from services.wire.reader import Reader

_MAX_FIELDS = 64

_TAG_OF = {cls: tag for tag, cls in MESSAGE_TYPES.items()}


def encode(item: object) -> bytes:
    """The frame of a message.

    Raises:
        TypeError: not one of `MESSAGE_TYPES`.
        ProtocolError: a field is outside its type or bounds, or the frame would be over MAX_FRAME_BYTES: no receiver
            would take it.
    """
    tag = _TAG_OF.get(type(item))
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
        cls = MESSAGE_TYPES.get(tag)
        if cls is None:
            raise ProtocolError(f"unknown tag {tag}")
        if cls is Hello:
            version = reader.peek_integer(0, 2**31 - 1)
            if version != PROTOCOL_VERSION:  # the rest is not read: its shape is the other version's affair
                return ForeignHello(version)
        item = fields_of(cls).read(reader, length - 1)
        reader.finish()
    except IndexError:
        raise ProtocolError("frame ends early") from None
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a string is not UTF-8: {error.reason}") from error
    return cast(object, item)
