"""Metrics travel packed; what comes out is what went in, and anything else is refused."""

from __future__ import annotations

import math

import msgpack
import pytest

from services.wire.errors import ProtocolError
from services.wire.samples import MAX_SAMPLES, MAX_SAMPLES_BYTES, pack_samples, unpack_samples


def test_what_was_packed_is_unpacked() -> None:
    samples = {f"name {number} 计数": number / 3 for number in range(MAX_SAMPLES)}
    assert unpack_samples(pack_samples(samples)) == samples
    assert unpack_samples(pack_samples({"whole": 3})) == {"whole": 3.0}
    assert pack_samples({}) == b""
    assert unpack_samples(b"") == {}


@pytest.mark.parametrize(
    "samples",
    [
        {"x": math.nan},
        {"x": math.inf},
        {"k" * 513: 1.0},
        {str(number): 0.0 for number in range(MAX_SAMPLES + 1)},
        {f"{number:0500d}": 0.0 for number in range(MAX_SAMPLES_BYTES // 500)},
    ],
    ids=["nan", "infinity", "long name", "many", "large"],
)
def test_what_nobody_would_unpack_is_not_packed(samples: dict[str, float]) -> None:
    with pytest.raises(ProtocolError):
        pack_samples(samples)


@pytest.mark.parametrize(
    "packed",
    [
        msgpack.packb({"x": math.nan}),
        msgpack.packb({"x": "1"}),
        msgpack.packb({1: 1.0}),
        msgpack.packb({"k" * 513: 1.0}),
        msgpack.packb([1.0]),
        msgpack.packb({"x": 1.0}) + b"\x00",
        msgpack.packb({"x": 1.0})[:-1],
        b"\x81\xa1\xff\x01",
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_anything_else_is_refused(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_samples(packed)
