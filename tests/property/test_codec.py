"""The codec against a naive reference: every message type, every truncation, every flipped byte, mutated frames."""

from __future__ import annotations

import dataclasses
import enum
import math
import random
import types
import typing
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.wire.codec import decode, encode
from services.wire.errors import ProtocolError
from services.wire.forms import MAX_FRAME_BYTES, MAX_KEY_BYTES, Column, Exactly, Limit, Range
from services.wire.members import ForeignHello, Hello
from services.wire.messages import MESSAGE_TYPES, PROTOCOL_VERSION
from tests.contract.message_examples import EXAMPLES
from tests.message_strategies import messages

every_type = pytest.mark.parametrize("cls", MESSAGE_TYPES.values(), ids=lambda cls: cls.__name__)


def outcome(decoder: Callable[[bytes], object], frame: bytes) -> object:
    """What a decoder makes of a frame: the message, or ProtocolError itself; any other exception fails the test."""
    try:
        return decoder(frame)
    except ProtocolError:
        return ProtocolError


# ---------------------------------------------------------------- the naive reference: build everything, then check


def naive_decode(frame: bytes) -> object:
    try:
        items = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(str(error)) from error
    require(type(items) is list and len(items) >= 1 and type(items[0]) is int)
    cls = MESSAGE_TYPES.get(items[0])
    require(cls is not None)
    assert cls is not None
    if cls is Hello and len(items) > 1 and type(items[1]) is int and items[1] != PROTOCOL_VERSION:
        require(0 <= items[1] < 2**31)
        return ForeignHello(items[1])
    return naive_dataclass(cls, items[1:])


def naive_dataclass(cls: type, items: Any) -> object:
    require(type(items) is list and len(items) == len(dataclasses.fields(cls)))
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    made = cls(*(naive_value(hints[field.name], item) for field, item in zip(fields, items, strict=True)))
    if hasattr(made, "check"):
        made.check()
    return typing.cast(object, made)


def naive_value(hint: Any, item: Any) -> Any:
    bounds: dict[type, Any] = {}
    if typing.get_origin(hint) is typing.Annotated:
        hint, *extra = typing.get_args(hint)
        bounds = {type(bound): bound for bound in extra}
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return None if item is None else naive_value(typing.get_args(hint)[0], item)
    if origin is tuple:
        require(type(item) is list and len(item) <= bounds[Limit].most)
        return tuple(naive_value(typing.get_args(hint)[0], inner) for inner in item)
    if origin is dict:
        require(type(item) is dict and all(type(key) is str and len(key.encode()) <= MAX_KEY_BYTES for key in item))
        return {key: naive_value(float, value) for key, value in item.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        require(type(item) is (str if issubclass(hint, str) else int) and item in [member.value for member in hint])
        return hint(item)
    if dataclasses.is_dataclass(hint):
        return naive_dataclass(typing.cast(type, hint), item)
    require(type(item) is hint or (hint is float and type(item) is int))
    if hint is int:
        limits = bounds.get(Range, Range(-(2**63), 2**63 - 1))
        require(limits.low <= item <= limits.high)
    elif hint is float:
        require(math.isfinite(item))
        return float(item)
    elif hint is str:
        require(len(item.encode()) <= bounds[Limit].most)
    elif hint is bytes:
        naive_column(bounds, item)
    return item


def naive_column(bounds: dict[type, Any], item: bytes) -> None:
    require(len(item) == bounds[Exactly].length if Exactly in bounds else True)
    require(len(item) <= bounds.get(Limit, Limit(MAX_FRAME_BYTES)).most)
    column = bounds.get(Column, Column(1))
    require(len(item) % column.item_bytes == 0)
    if column.is_natural:
        require(all(int.from_bytes(item[i : i + 4], "little", signed=True) >= 0 for i in range(0, len(item), 4)))


def require(holds: bool) -> None:
    if not holds:
        raise ProtocolError("the naive reference refuses it")


# ---------------------------------------------------------------- properties


@every_type
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_round_trip_of_every_message_type(cls: type, data: st.DataObject) -> None:
    item = data.draw(messages(cls))
    frame = encode(item)
    expected = ForeignHello(item.version) if cls is Hello and item.version != PROTOCOL_VERSION else item
    assert decode(frame) == expected
    assert naive_decode(frame) == expected


@every_type
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_every_truncation_and_every_trailing_byte_is_refused(cls: type, data: st.DataObject) -> None:
    item = data.draw(messages(cls))
    if cls is Hello:
        item = dataclasses.replace(item, version=PROTOCOL_VERSION)
    frame = encode(item)
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:length])
    for byte in (0x00, 0x90, 0xC0, 0xC1, 0xFF):
        with pytest.raises(ProtocolError):
            decode(frame + bytes([byte]))


@pytest.mark.parametrize("item", EXAMPLES, ids=lambda item: type(item).__name__)
def test_every_flipped_byte_gives_a_message_or_a_protocol_error(item: object) -> None:
    frame = encode(item)
    for position in range(len(frame)):
        for flip in (0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF, 0x7F):
            changed = bytearray(frame)
            changed[position] ^= flip
            assert_a_message_or_an_error(outcome(decode, bytes(changed)))


@pytest.mark.parametrize("num_frames", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_mutated_frames_are_messages_or_protocol_errors(num_frames: int) -> None:
    generator = random.Random(num_frames)
    frames = [encode(item) for item in EXAMPLES]
    for _ in range(num_frames):
        assert_a_message_or_an_error(outcome(decode, mutated(generator, frames)))


def test_mutated_frames_decode_as_the_naive_reference_says() -> None:
    generator = random.Random(7)
    frames = [encode(item) for item in EXAMPLES]
    num_messages = 0
    for _ in range(30_000):
        frame = mutated(generator, frames)
        found, expected = outcome(decode, frame), outcome(naive_decode, frame)
        if isinstance(found, ForeignHello) or (expected is not ProtocolError and b"\xca" in frame):
            continue  # the rest of another version's Hello is not read; floats of 32 bits are msgpack, but not ours
        assert found == expected, frame.hex()
        num_messages += found is not ProtocolError
    assert 3_000 < num_messages < 27_000  # both sides of the question were asked


WRONG = st.sampled_from(
    [None, True, -1, 2**31, 2**64, 2**70, 1.5, math.nan, math.inf, "x", "\ud800", "x" * 10_000, b"x", b"\xff" * 16,
     b"\xff" * 17, bytearray(16), [], (), (1,), ("x",) * 5000, {"a": math.nan}, {1: 1.0}, {"k" * 600: 1.0}, object()]
)  # fmt: skip


@every_type
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_encoded_can_be_decoded_and_the_rest_is_refused_at_the_sender(cls: type, data: st.DataObject) -> None:
    item = data.draw(messages(cls))
    name = data.draw(st.sampled_from([field.name for field in dataclasses.fields(cls)]))
    item = dataclasses.replace(item, **{name: data.draw(WRONG)})
    try:
        frame = encode(item)
    except ProtocolError:
        return
    found = decode(frame)
    assert found == item or (cls is Hello and isinstance(found, ForeignHello))


def mutated(generator: random.Random, frames: list[bytes]) -> bytes:
    frame = bytearray(generator.choice(frames))
    for _ in range(generator.randint(1, 3)):
        match generator.randrange(4):
            case 0:
                frame[generator.randrange(len(frame))] = generator.randrange(256)
            case 1:
                frame[generator.randrange(len(frame))] ^= 1 << generator.randrange(8)
            case 2:
                del frame[generator.randrange(len(frame)) : generator.randrange(len(frame) + 1)]
            case 3:
                frame.insert(generator.randrange(len(frame) + 1), generator.choice(b"\x00\x90\xc0\xc4\xcf\xd9\xdc\xff"))
        if not frame:
            return b""
    return bytes(frame)


def assert_a_message_or_an_error(found: object) -> None:
    assert found is ProtocolError or type(found) in MESSAGE_TYPES.values() or type(found) is ForeignHello
