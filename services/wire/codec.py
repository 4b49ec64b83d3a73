"""Encoding of messages: msgpack arrays `[tag, field, field, ...]`, decoded strictly and within bounds.

A message is a frozen dataclass registered under an integer tag. Its decoder is compiled once from the field types and
walks the frame field by field, looking at the type byte before reading, so a hostile frame (nested arrays, a list of a
million empty lists) is refused at its first wrong byte instead of being built in memory first. Nothing that came from a
client is ever read as a message.

Supported field types: `int`, `float` (finite), `bool`, `str`, `bytes`, `X | None`, `tuple[X, ...]`, `dict[str, float]`,
IntEnum/StrEnum, and registered or plain frozen dataclasses (nested arrays without a tag). Bounds come from `Annotated`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgpack

from services.wire.errors import ProtocolError

MAX_FRAME_BYTES = 16 * 1024 * 1024
_DEFAULT_MAX_STR = 256
_DEFAULT_MAX_BYTES = MAX_FRAME_BYTES
_DEFAULT_MAX_ITEMS = 4096


@dataclass(frozen=True)
class Limit:
    """The most bytes of a str (as UTF-8) or bytes field, or items of a tuple or dict."""

    most: int


@dataclass(frozen=True)
class Exactly:
    """The exact number of bytes of a bytes field."""

    length: int


@dataclass(frozen=True)
class Column:
    """A bytes field made of items of `item_bytes` each."""

    item_bytes: int


@dataclass(frozen=True)
class Range:
    """Inclusive bounds of an int field. Without it an int is a signed 64-bit number."""

    low: int
    high: int


class Reader:
    """A cursor over one frame. Every read looks at the type byte first and raises ProtocolError on a mismatch."""

    def __init__(self, frame: bytes) -> None:
        self._frame = frame
        self._unpacker = msgpack.Unpacker(
            raw=False,
            strict_map_key=True,
            max_buffer_size=max(len(frame), 1),
            max_str_len=len(frame),
            max_bin_len=len(frame),
            max_array_len=len(frame),
            max_map_len=len(frame),
            max_ext_len=0,
        )
        self._unpacker.feed(frame)

    def kind(self) -> int:
        """The type byte of the next value; ProtocolError at the end of the frame."""
        position = int(self._unpacker.tell())
        if position >= len(self._frame):
            raise ProtocolError("frame ends early")
        return self._frame[position]

    def scalar(self) -> Any:
        """The next value, which the caller has seen to be a scalar."""
        return self._unpacker.unpack()

    def array_length(self) -> int:
        """Consumes an array header."""
        kind = self.kind()
        if not (0x90 <= kind <= 0x9F or kind in (0xDC, 0xDD)):
            raise ProtocolError(f"expected an array, found type byte {kind:#04x}")
        return int(self._unpacker.read_array_header())

    def map_length(self) -> int:
        """Consumes a map header."""
        kind = self.kind()
        if not (0x80 <= kind <= 0x8F or kind in (0xDE, 0xDF)):
            raise ProtocolError(f"expected a map, found type byte {kind:#04x}")
        return int(self._unpacker.read_map_header())

    def finish(self) -> None:
        """ProtocolError unless the frame was read to its last byte."""
        if self._unpacker.tell() != len(self._frame):
            raise ProtocolError(f"{len(self._frame) - self._unpacker.tell()} bytes after the message")


Decoder = Callable[[Reader], Any]
FieldsDecoder = Callable[[Reader, int], Any]  # the reader, and how many fields the frame announces
M = TypeVar("M")
_tag_of: dict[type, int] = {}
_type_of: dict[int, type] = {}
_fields_decoder_of: dict[type, FieldsDecoder] = {}


def message(tag: int) -> Callable[[type[M]], type[M]]:
    """Registers a frozen dataclass as the message of `tag` (an integer that is never reused)."""

    def register(cls: type[M]) -> type[M]:
        if tag in _type_of:
            raise ValueError(f"tag {tag} is taken by {_type_of[tag].__name__}")
        _type_of[tag], _tag_of[cls] = cls, tag
        return cls

    return register


def registered_messages() -> dict[int, type]:
    """Every message type by its tag."""
    return dict(_type_of)


def encode(item: object) -> bytes:
    """The frame of a registered message; TypeError for anything else."""
    tag = _tag_of.get(type(item))
    if tag is None:
        raise TypeError(f"{type(item).__name__} is not a message")
    return cast(bytes, msgpack.packb([tag, *_plain_fields(item)], use_bin_type=True))


def decode(frame: bytes) -> object:
    """The message in a frame.

    Raises:
        ProtocolError: the frame is not exactly one of our messages, or a field is outside its bounds.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes, limit {MAX_FRAME_BYTES}")
    reader = Reader(frame)
    try:
        length = reader.array_length()
        tag = _decode_int(reader, 0, 0xFFFF)
        cls = _type_of.get(tag)
        if cls is None:
            raise ProtocolError(f"unknown tag {tag}")
        item = _decode_fields(cls, reader, length - 1)
        reader.finish()
    except ProtocolError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a message: {error}") from error
    return item


def _plain_fields(item: object) -> list[object]:
    return [_plain(getattr(item, field.name)) for field in dataclasses.fields(cast(Any, item))]


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return _plain_fields(value)
    return value


def _decode_fields(cls: type, reader: Reader, arity: int) -> object:
    decoder = _fields_decoder_of.get(cls)
    if decoder is None:
        decoder = _fields_decoder_of[cls] = _compile_fields(cls)
    return cast(object, decoder(reader, arity))


def _compile_fields(cls: type) -> FieldsDecoder:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [(field.name, _compile(hints[field.name])) for field in dataclasses.fields(cls)]
    check = getattr(cls, "check", None)

    def decode_fields(reader: Reader, arity: int) -> object:
        if arity != len(fields):
            raise ProtocolError(f"{cls.__name__} has {len(fields)} fields, frame holds {arity}")
        values = []
        for name, decoder in fields:
            try:
                values.append(decoder(reader))
            except ProtocolError as error:
                raise ProtocolError(f"{cls.__name__}.{name}: {error}") from None
        item = cls(*values)
        if check is not None:
            check(item)
        return item

    return decode_fields


def _compile(hint: Any, bounds: tuple[Any, ...] = ()) -> Decoder:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        inner, *extra = typing.get_args(hint)
        return _compile(inner, (*bounds, *extra))
    if origin is types.UnionType or origin is typing.Union:
        return _compile_optional(hint, bounds)
    if origin is tuple:
        return _compile_tuple(hint, bounds)
    if origin is dict:
        return _compile_metrics(bounds)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _compile_enum(hint)
    if dataclasses.is_dataclass(hint):
        nested = cast(type, hint)
        return lambda reader: _decode_fields(nested, reader, reader.array_length())
    if hint is int:
        limits = next((bound for bound in bounds if isinstance(bound, Range)), Range(-(2**63), 2**63 - 1))
        return lambda reader: _decode_int(reader, limits.low, limits.high)
    if hint is str:
        most_str = _limit(bounds, _DEFAULT_MAX_STR)
        return lambda reader: _decode_str(reader, most_str)
    if hint is bytes:
        return _compile_bytes(bounds)
    if hint is bool:
        return _decode_bool
    if hint is float:
        return _decode_float
    raise TypeError(f"no wire form for {hint!r}")


def _limit(bounds: tuple[Any, ...], default: int) -> int:
    return next((bound.most for bound in bounds if isinstance(bound, Limit)), default)


def _compile_optional(hint: Any, bounds: tuple[Any, ...]) -> Decoder:
    inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if len(inner) != 1 or len(typing.get_args(hint)) != 2:
        raise TypeError(f"only `X | None` unions have a wire form, not {hint!r}")
    decoder = _compile(inner[0], bounds)

    def decode_optional(reader: Reader) -> object:
        if reader.kind() == 0xC0:
            reader.scalar()
            return None
        return decoder(reader)

    return decode_optional


def _compile_tuple(hint: Any, bounds: tuple[Any, ...]) -> Decoder:
    decoder = _compile(typing.get_args(hint)[0])
    most = _limit(bounds, _DEFAULT_MAX_ITEMS)

    def decode_tuple(reader: Reader) -> object:
        length = reader.array_length()
        if length > most:
            raise ProtocolError(f"{length} items, limit {most}")
        return tuple(decoder(reader) for _ in range(length))

    return decode_tuple


def _compile_metrics(bounds: tuple[Any, ...]) -> Decoder:
    most = _limit(bounds, _DEFAULT_MAX_ITEMS)

    def decode_metrics(reader: Reader) -> object:
        length = reader.map_length()
        if length > most:
            raise ProtocolError(f"{length} entries, limit {most}")
        return {_decode_str(reader, 512): _decode_float(reader) for _ in range(length)}

    return decode_metrics


def _compile_enum(hint: type[enum.Enum]) -> Decoder:
    is_text = issubclass(hint, str)

    def decode_enum(reader: Reader) -> object:
        value = _decode_str(reader, 64) if is_text else _decode_int(reader, 0, 0xFFFF)
        try:
            return hint(value)
        except ValueError:
            raise ProtocolError(f"{value!r} is no {hint.__name__}") from None

    return decode_enum


def _compile_bytes(bounds: tuple[Any, ...]) -> Decoder:
    most = _limit(bounds, _DEFAULT_MAX_BYTES)
    exactly = next((bound.length for bound in bounds if isinstance(bound, Exactly)), None)
    item_bytes = next((bound.item_bytes for bound in bounds if isinstance(bound, Column)), 1)

    def decode_bytes(reader: Reader) -> object:
        if reader.kind() not in (0xC4, 0xC5, 0xC6):
            raise ProtocolError(f"expected bytes, found type byte {reader.kind():#04x}")
        value = reader.scalar()
        if len(value) > most or len(value) % item_bytes or (exactly is not None and len(value) != exactly):
            raise ProtocolError(f"{len(value)} bytes do not fit the field")
        return value

    return decode_bytes


def _decode_int(reader: Reader, low: int, high: int) -> int:
    kind = reader.kind()
    if not (kind <= 0x7F or kind >= 0xE0 or 0xCC <= kind <= 0xD3):
        raise ProtocolError(f"expected an integer, found type byte {kind:#04x}")
    value = int(reader.scalar())
    if not low <= value <= high:
        raise ProtocolError(f"{value} is outside [{low}, {high}]")
    return value


def _decode_float(reader: Reader) -> float:
    kind = reader.kind()
    if not (kind == 0xCB or kind <= 0x7F or kind >= 0xE0 or 0xCC <= kind <= 0xD3):  # a whole number may come as an int
        raise ProtocolError(f"expected a number, found type byte {kind:#04x}")
    value = float(reader.scalar())
    if not math.isfinite(value):
        raise ProtocolError(f"{value} is not finite")
    return value


def _decode_bool(reader: Reader) -> bool:
    if reader.kind() not in (0xC2, 0xC3):
        raise ProtocolError(f"expected a boolean, found type byte {reader.kind():#04x}")
    return bool(reader.scalar())


def _decode_str(reader: Reader, most: int) -> str:
    kind = reader.kind()
    if not (0xA0 <= kind <= 0xBF or kind in (0xD9, 0xDA, 0xDB)):
        raise ProtocolError(f"expected a string, found type byte {kind:#04x}")
    value = reader.scalar()
    if len(value.encode()) > most:
        raise ProtocolError(f"string over {most} bytes")
    return cast(str, value)
