"""Encoding of messages: msgpack arrays `[tag, field, field, ...]`, decoded strictly and within bounds.

A message is a frozen dataclass with an integer tag (`messages`). Its form is compiled once from the field types
(`forms`); a frame is read value by value (`reader`), so a hostile one (nested arrays, a list of a million empty lists)
is refused at its first wrong byte instead of being built in memory first. Small ones of plain values, which are nearly
all, are unpacked at once (`flat`). Nothing that came from a client is ever read as a message.
"""

from __future__ import annotations

import msgpack

from services.wire.errors import ProtocolError
from services.wire.flat import MAX_FLAT_BYTES
from services.wire.forms import MAX_FRAME_BYTES, fields_of
from services.wire.members import ForeignHello, Hello
from services.wire.messages import MESSAGE_TYPES, PROTOCOL_VERSION
from services.wire.reader import Reader

_MAX_FIELDS = 64
_LONG_ARRAY = b"\xdc"  # more than 15 values

_FIELDS_OF = {tag: fields_of(cls) for tag, cls in MESSAGE_TYPES.items()}
_TAG_OF = {cls: tag for tag, cls in MESSAGE_TYPES.items()}
_packer = msgpack.Packer()  # a new one for each message would ask the system for its buffer each time


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
        frame: bytes = _packer.pack((tag, *_FIELDS_OF[tag].write(item)))
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
    if len(frame) <= MAX_FLAT_BYTES:
        place = 3 if frame.startswith(_LONG_ARRAY) else 1  # of the tag
        fields = _FIELDS_OF.get(frame[place]) if len(frame) > place else None
        item = None if fields is None or fields.read_flat is None else fields.read_flat(frame)
        if item is not None:
            return item
    elif len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes, limit {MAX_FRAME_BYTES}")
    return _decode_by_value(frame)


def _decode_by_value(frame: bytes) -> object:
    """Reads every value on its own, and says what is wrong with the first that is."""
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
        item: object = _FIELDS_OF[tag].read(reader, length - 1)
        reader.finish()
    except IndexError:
        raise ProtocolError("frame ends early") from None
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a string is not UTF-8: {error.reason}") from error
    return item
