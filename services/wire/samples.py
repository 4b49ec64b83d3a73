"""The metrics of a process as they travel: packed by who counts, unpacked by who shows them.

Heartbeats bring them to the scheduler and telemetry takes them on to the tokenizers; on the way nobody looks inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgpack

from services.wire.errors import ProtocolError
from services.wire.forms import MAX_KEY_BYTES
from services.wire.reader import Reader

MAX_SAMPLES = 4096
MAX_SAMPLES_BYTES = 1024 * 1024


def pack_samples(samples: Mapping[str, float]) -> bytes:
    """Packs numbers by their names; b"" when there are none.

    Raises:
        ProtocolError: more than MAX_SAMPLES or MAX_SAMPLES_BYTES, a name of more than MAX_KEY_BYTES, or a number that
            is not finite.
    """
    if not samples:
        return b""
    numbers = {name: float(value) for name, value in samples.items()}
    if len(numbers) > MAX_SAMPLES or not all(map(math.isfinite, numbers.values())):
        raise ProtocolError(f"{len(numbers)} samples, at most {MAX_SAMPLES}, all of them finite")
    if max(len(name.encode()) for name in numbers) > MAX_KEY_BYTES:
        raise ProtocolError(f"the name of a sample is over {MAX_KEY_BYTES} bytes")
    packed: bytes = msgpack.packb(numbers)
    if len(packed) > MAX_SAMPLES_BYTES:
        raise ProtocolError(f"samples of {len(packed)} bytes, at most {MAX_SAMPLES_BYTES}")
    return packed


def unpack_samples(packed: bytes) -> dict[str, float]:
    """What `pack_samples` packed.

    Raises:
        ProtocolError: the bytes are anything else.
    """
    if not packed:
        return {}
    reader = Reader(packed)
    try:
        samples = reader.number_map(MAX_SAMPLES, MAX_KEY_BYTES)
        reader.finish()
    except IndexError:
        raise ProtocolError("samples end early") from None
    except UnicodeDecodeError as error:
        raise ProtocolError(f"the name of a sample is not UTF-8: {error.reason}") from error
    return samples
