"""What a hostile or broken peer may send: each case is refused at once, and costs next to nothing."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import msgpack
import pytest

from services.wire.answers import HopReport, StopFound, TextChunks, TokensProduced
from services.wire.codec import decode, encode
from services.wire.columns import pack_int32
from services.wire.errors import ProtocolError
from services.wire.finish import Finish
from services.wire.flat import MAX_FLAT_BYTES
from services.wire.forms import MAX_FRAME_BYTES
from services.wire.members import ForeignHello, Heartbeat, Hello, Role, State, Telemetry, WorkerCard
from services.wire.messages import MESSAGE_TYPES, PROTOCOL_VERSION
from services.wire.reader import MAX_VALUES
from services.wire.requests import Abort, Acknowledge, Admitted, Refused
from services.wire.samples import MAX_SAMPLES_BYTES
from services.wire.steps import StepPlan
from tests.contract.message_examples import EXAMPLES

ID = bytes(16)
REPORT = (32, ID, 1, "scheduler", "s", 1, 1, 1)


def frame_of(*items: object) -> bytes:
    packed: bytes = msgpack.packb(list(items))
    return packed


def refusal(frame: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(frame)
    return str(caught.value)


def peak_bytes(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def array16(length: int) -> bytes:
    return b"\xdc" + length.to_bytes(2, "big")


def array32(length: int) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big")


def map32(length: int) -> bytes:
    return b"\xdf" + length.to_bytes(4, "big")


REPORT_HEAD = b"\x99" + b"".join(map(msgpack.packb, REPORT))
EMPTY_LISTS = array32(20_000_000) + b"\x90" * 20_000_000
HOSTILE = {
    "20 MB of empty lists": EMPTY_LISTS,
    "16 MB of empty lists": (array32(16_000_000) + b"\x90" * 16_000_000)[:MAX_FRAME_BYTES],
    "a message of empty lists": b"\x92\x07" + array32(4096) + b"\x90" * 4096,
    "a field of a million empty lists": b"\x92\x07" + array32(1_000_000) + b"\x90" * 1_000_000,
    "lists in lists in lists": b"\x91" * 1_000_000,
    "maps in maps in maps": REPORT_HEAD + b"\x81\xa1k" * 300_000,
    "a string of 4 GB announced": b"\x94\x0b\xdb\xff\xff\xff\xff",
    "bytes of 4 GB announced": b"\x94\x0b\xc6\xff\xff\xff\xff",
    "an array of 4 G items announced": b"\x92\x07" + array32(2**32 - 1),
    "a map of 4 G entries announced": REPORT_HEAD + map32(2**32 - 1),
    "an integer as a string of digits": b"\x93\x02\x01\xd9\xff" + b"9" * 255,
}


@pytest.mark.parametrize("frame", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_frames_are_refused_at_once_and_not_built(frame: bytes) -> None:
    started = time.process_time()
    refusal(frame)
    assert time.process_time() - started < 0.05  # untyped decoding of the first one takes seconds
    assert peak_bytes(lambda: refusal(frame)) < 200_000


def test_a_small_frame_of_lists_cannot_build_much_either() -> None:
    """Those are unpacked before they are checked."""
    tag = next(tag for tag, cls in MESSAGE_TYPES.items() if cls is Acknowledge)
    of_lists = array16(63) + (array16(64) + b"\x90" * 64) * 63
    frame = b"\x94" + bytes([tag]) + of_lists * 3
    assert MAX_FLAT_BYTES // 8 < len(frame) < MAX_FLAT_BYTES
    assert "expected bytes" in refusal(frame)
    assert peak_bytes(lambda: refusal(frame)) < 2_000_000


def test_the_costliest_frame_is_refused_by_the_count_of_its_values() -> None:
    of_prompt = frame_of(ID, 0, 0, b"", b"", b"")
    head = array16(17) + frame_of(41, 1, 1, b"", b"", b"", b"", b"", b"", b"", 1, 1, b"", b"", b"")[1:]
    frame = head + array32(65_536) + of_prompt * 65_536 + array32(65_536)
    assert len(frame) < MAX_FRAME_BYTES
    assert f"more than {MAX_VALUES} values" in refusal(frame)


def test_frames_of_the_greatest_length_are_taken_and_longer_ones_are_not() -> None:
    room = MAX_FRAME_BYTES - 200
    ids = bytes(16 * (room // 24))
    numbers = bytes(4 * (room // 24))
    item = StopFound(ids, numbers, numbers)
    assert decode(encode(item)) == item
    with pytest.raises(ProtocolError, match="frame limit"):
        encode(StopFound(ids + bytes(16 * 20), numbers + bytes(4 * 20), numbers + bytes(4 * 20)))
    assert "limit" in refusal(bytes(MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "frame", [b"", b"\x90", b"\xc0", b"\x00", b"\xa3abc", b"\x80", b"\x92\x06", b"\xdc", b"\xdc\x00"]
)
def test_frames_that_hold_no_message(frame: bytes) -> None:
    refusal(frame)


def test_unknown_tags_are_named() -> None:
    assert "unknown tag 999" in refusal(frame_of(999, ID, 1))
    assert "outside" in refusal(frame_of(-1, ID, 1))
    assert "expected an integer" in refusal(frame_of("Admitted", ID, 1))


@pytest.mark.parametrize("item", EXAMPLES, ids=lambda item: type(item).__name__)
def test_one_field_less_and_one_more_are_refused(item: object) -> None:
    items = msgpack.unpackb(encode(item))
    assert "fields" in refusal(frame_of(*items, None))
    message = refusal(frame_of(*items[:-1]))
    assert "fields" in message or "frame ends early" in message


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ((11, b"x" * 15, 1), "Admitted.request_id: 15 bytes do not fit"),
        ((11, b"x" * 17, 1), "Admitted.request_id: 17 bytes, limit 16"),
        ((11, "x" * 16, 1), "Admitted.request_id: expected bytes"),
        ((11, ID, -1), "Admitted.attempt: -1 is outside"),
        ((11, ID, 2**31), "Admitted.attempt: 2147483648 is outside"),
        ((11, ID, True), "Admitted.attempt: expected an integer"),
        ((11, ID, 1.0), "Admitted.attempt: expected an integer"),
        ((11, ID, None), "Admitted.attempt: expected an integer"),
        ((5, 1, 9, 0, b""), "Heartbeat.state: 9 is no State"),
        ((*REPORT, {"x": float("nan")}), "HopReport.counters: nan is not finite"),
        ((*REPORT, {"x": float("inf")}), "HopReport.counters: inf is not finite"),
        ((*REPORT, {"x": "1"}), "HopReport.counters: expected an integer"),
        ((*REPORT, {1: 1.0}), "HopReport.counters: expected a string"),
        ((*REPORT, {"k" * 513: 1.0}), "HopReport.counters: string of 513 bytes"),
        ((12, ID, 1, 399, "", "", "", 0), "Refused.status: 399 is outside"),
        ((12, ID, 1, 503, "c" * 129, "", "", 0), "Refused.code: string of 129 bytes, limit 128"),
        ((13, ID, b"\0\0\0\0\0\0\0\0"), "columns of different lengths"),
        ((13, ID, b"\0\0\0\x80"), "Abort.attempts: a negative number"),
        ((13, ID, b"\0\0\0"), "Abort.attempts: 3 bytes do not fit"),
    ],
)
def test_wrong_fields_are_named(items: tuple[object, ...], expected: str) -> None:
    assert expected in refusal(frame_of(*items))


def test_strings_must_be_utf8() -> None:
    assert "not UTF-8" in refusal(b"\x98\x0c\xc4\x10" + ID + b"\x01\xcd\x01\xf7\xa2\xf0\x9f\xa0\xa0\x00")


def test_columns_must_agree() -> None:
    one = pack_int32([1])
    wrong_count = TokensProduced(ID, one, one, pack_int32([2]), one, b"\0", one)
    wrong_finish = TokensProduced(ID, one, one, one, one, bytes([max(Finish) + 1]), one)
    missing_text = TextChunks(ID, one, one, one, one, one, (), b"\0", one, one)
    wrong_sample = StepPlan(1, 1, b"", (), b"", b"", b"", one, one, one, b"\2")
    uneven_card = Hello(PROTOCOL_VERSION, Role.GPU_WORKER, "w", 1, "", State.READY,
                        WorkerCard(1, 1, 1, 1, 1, 1, 1, 1.0, ID, one, b""))  # fmt: skip
    for item in (wrong_count, wrong_finish, missing_text, wrong_sample, uneven_card):
        with pytest.raises(ProtocolError):
            encode(item)


def test_the_sender_is_told_what_no_receiver_would_take() -> None:
    for item, field in [
        (Admitted(bytes(15), 0), "Admitted.request_id"),
        (Heartbeat(1, State.READY, 0, bytes(MAX_SAMPLES_BYTES + 1)), "Heartbeat.metrics"),
        (HopReport(ID, 1, Role.SCHEDULER, "s", 1, 1, 1, {"x": float("nan")}), "HopReport.counters"),
        (HopReport(ID, 1, Role.SCHEDULER, "s", 1, 1, 1, {str(i): 0.0 for i in range(65)}), "HopReport.counters"),
        (Refused(ID, 0, 200, "", "", "", 0), "Refused.status"),
        (Refused(ID, 0, 503, "", "\ud800", "", 0), "Refused"),
        (Abort(ID, b"\xff\xff\xff\xff"), "Abort.attempts"),
        (Telemetry(("not a member",)), "Telemetry.members"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(ProtocolError, match=field):
            encode(item)


def test_only_messages_are_encoded() -> None:
    with pytest.raises(TypeError):
        encode({"type": "Admitted", "request_id": ID})
    with pytest.raises(TypeError):
        encode(ForeignHello(2))


def test_a_hello_of_another_version_is_known_by_its_version_alone() -> None:
    assert decode(frame_of(1, PROTOCOL_VERSION + 1, {"anything": [1, 2, 3]}, "else")) == ForeignHello(
        PROTOCOL_VERSION + 1
    )
    assert decode(frame_of(1, 0)) == ForeignHello(0)
    assert "fields" in refusal(frame_of(1, PROTOCOL_VERSION, "tokenizer"))
    refusal(frame_of(1, "1"))


def test_every_message_has_one_tag() -> None:
    """That a tag has one message is what the linter sees: a key that stands twice."""
    assert len(set(MESSAGE_TYPES.values())) == len(MESSAGE_TYPES)
    assert list(MESSAGE_TYPES) == sorted(MESSAGE_TYPES)
