"""The bytes of every message are part of the contract: a change of one is a change of PROTOCOL_VERSION."""

from __future__ import annotations

import pytest

from services.wire.codec import decode, encode
from services.wire.messages import MESSAGE_TYPES, PROTOCOL_VERSION
from tests.contract.message_examples import EXAMPLES, GOLDEN_FILE


def golden_frames() -> dict[str, bytes]:
    lines = GOLDEN_FILE.read_text(encoding="ascii").splitlines()
    return {name: bytes.fromhex(frame) for name, frame in (line.split() for line in lines)}


def test_every_message_has_one_example_and_golden_bytes() -> None:
    names = [type(item).__name__ for item in EXAMPLES]
    assert names == [cls.__name__ for cls in MESSAGE_TYPES.values()]
    assert list(golden_frames()) == names


@pytest.mark.parametrize("item", EXAMPLES, ids=lambda item: type(item).__name__)
def test_golden_bytes(item: object) -> None:
    """On a wanted change: raise PROTOCOL_VERSION, run `python -m tests.contract.message_examples`, read the diff."""
    frame = golden_frames()[type(item).__name__]
    assert encode(item) == frame
    assert decode(frame) == item


def test_the_golden_bytes_are_those_of_this_version() -> None:
    hello = golden_frames()["Hello"]
    assert hello[:3] == bytes([0x98, 1, PROTOCOL_VERSION])
