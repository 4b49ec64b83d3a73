"""Ports over real sockets: absent peers, order, bounds, and what is no message."""

from __future__ import annotations

import contextlib
import logging
import time

import pytest
import zmq

from services.wire import transport
from services.wire.codec import encode
from services.wire.errors import ProtocolError
from services.wire.forms import MAX_FRAME_BYTES
from services.wire.members import Goodbye, Heartbeat, State
from services.wire.requests import Abort, Admitted
from services.wire.transport import Port
from tests.sockets import Sockets, messages, receive, wait_until

PEER = b"tokenizer/t/0000000000000001"


def numbers(items: list[object]) -> list[int]:
    return [item.epoch for item in items if isinstance(item, Goodbye)]


@pytest.mark.parametrize("endpoint", ["", "tcp://127.0.0.1:0"], ids=["ipc", "tcp"])
def test_messages_go_both_ways_and_say_from_whom(made: Sockets, endpoint: str) -> None:
    router = made.router(endpoint)
    dealer = made.dealer(router.address, PEER)
    dealer.send(Goodbye(1))
    [(port, envelope)] = receive([router, dealer], 1)
    assert (port, envelope.peer, envelope.message) == (router, PEER, Goodbye(1))
    assert router.send(PEER, Admitted(bytes(16), 2))
    [(port, envelope)] = receive([dealer], 1)
    assert (port, envelope.peer, envelope.message) == (dealer, b"", Admitted(bytes(16), 2))
    assert router.stats.received == dealer.stats.received == router.stats.sent == dealer.stats.sent == 1
    assert router.stats.received_bytes == dealer.stats.sent_bytes == len(encode(Goodbye(1)))


def test_an_absent_peer_is_noticed_at_once(made: Sockets) -> None:
    router = made.router()
    assert not router.send(PEER, Goodbye(1))
    assert not router.send_now(PEER, Goodbye(1))
    assert router.stats.undeliverable == 2
    assert not router.has_outbox


def test_a_server_that_comes_later_gets_what_was_sent_before_in_order(made: Sockets) -> None:
    dealer = made.dealer(made.endpoint(), PEER)
    assert all(dealer.send(Goodbye(number)) for number in range(100))
    assert dealer.stats.outbox_frames == 100
    router = made.router()
    assert numbers(messages(receive([router, dealer], 100))) == list(range(100))
    assert dealer.stats.outbox_frames == 0
    assert not dealer.has_outbox


def test_what_is_worthless_later_is_not_kept_for_an_absent_server(made: Sockets) -> None:
    dealer = made.dealer(made.endpoint(), PEER)
    assert not any(dealer.send_now(Heartbeat(1, State.READY, 0)) for _ in range(100))
    assert not dealer.has_outbox
    dealer.send(Goodbye(1))
    router = made.router()
    assert messages(receive([router, dealer], 1)) == [Goodbye(1)]
    assert dealer.send_now(Goodbye(2))
    assert messages(receive([router], 1)) == [Goodbye(2)]


def test_what_must_not_wait_never_overtakes_what_waits(made: Sockets) -> None:
    dealer = made.dealer(made.endpoint(), PEER)
    dealer.send(Goodbye(1))
    router = made.router()
    dealer.socket.poll(500, zmq.POLLOUT)  # the connection is up, yet the first message still waits
    assert not dealer.send_now(Goodbye(2))
    assert numbers(messages(receive([router, dealer], 1))) == [1]


@pytest.mark.parametrize("limit", ["frames", "bytes"])
def test_a_peer_that_does_not_read_never_blocks_its_sender(
    made: Sockets, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(transport, "_MAX_OUTBOX_FRAMES" if limit == "frames" else "_MAX_OUTBOX_BYTES", 1000)
    router = made.router()
    dealer = made.dealer(router.address, PEER)
    dealer.send(Goodbye(0))
    receive([router, dealer], 1)
    sent = 0
    while router.send(PEER, Goodbye(sent)):
        sent += 1
        assert sent < 100_000, "neither ZeroMQ nor the outbox has a bound"
    assert router.stats.outbox_frames > 0
    assert router.stats.undeliverable == 1
    assert numbers(messages(receive([router, dealer], sent))) == list(range(sent))
    assert router.send(PEER, Goodbye(sent))
    assert numbers(messages(receive([router, dealer], 1))) == [sent]


def test_an_empty_outbox_takes_one_frame_of_any_size(made: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_MAX_OUTBOX_BYTES", 10)
    dealer = made.dealer(made.endpoint(), PEER)
    assert dealer.send(Abort(bytes(1600), bytes(400)))
    assert not dealer.send(Abort(bytes(1600), bytes(400)))


def test_what_waits_for_a_peer_that_is_gone_is_dropped(made: Sockets) -> None:
    router = made.router()
    dealer = made.dealer(router.address, PEER)
    dealer.send(Goodbye(0))
    receive([router, dealer], 1)
    while router.stats.outbox_frames == 0:
        assert router.send(PEER, Goodbye(1))
    router.forget(PEER)
    assert not router.has_outbox
    assert router.stats.outbox_frames == 0
    while router.stats.outbox_frames == 0:
        assert router.send(PEER, Goodbye(2))
    dealer.close()

    def outbox_is_empty() -> bool:
        router.socket.poll(10)
        router.flush()
        return not router.has_outbox

    wait_until(outbox_is_empty)
    assert router.stats.outbox_frames == 0
    assert not router.send(PEER, Goodbye(3))


def test_what_is_no_message_is_counted_and_dropped(made: Sockets, caplog: pytest.LogCaptureFixture) -> None:
    router = made.router()
    raw = made.raw(zmq.DEALER, router.address, b"odd\r\npeer")
    garbage: list[list[bytes]] = [[b""], [b"\x80\x04K\x01."], [b"GET / HTTP/1.1\r\n\r\n"], [encode(Goodbye(1))[:-1]]]
    several = [[b"", encode(Goodbye(1))], [encode(Goodbye(1)), encode(Goodbye(2))], [b"x"] * 1000]
    for frames in several + garbage:
        raw.send_multipart(frames)
    raw.send(encode(Goodbye(7)))
    with caplog.at_level(logging.WARNING):
        assert messages(receive([router], 1)) == [Goodbye(7)]
    assert router.stats.rejected == len(garbage) + len(several)
    assert router.stats.received == 1
    assert "several frames" in caplog.text
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_a_pickle_is_only_bytes(made: Sockets) -> None:
    """Security rule 1: what would run a command where objects are read from sockets is a dropped frame here."""
    router = made.router()
    touched = made.directory / "touched"
    raw = made.raw(zmq.DEALER, router.address)
    for payload in (b"cos\nsystem\n(S'touch %s'\ntR.", b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c%s\x85R."):
        raw.send(payload % str(touched).encode())
    raw.send(encode(Goodbye(1)))
    assert messages(receive([router], 1)) == [Goodbye(1)]
    assert router.stats.rejected == 2
    assert not touched.exists()


def test_a_flood_of_garbage_does_not_fill_the_log(made: Sockets, caplog: pytest.LogCaptureFixture) -> None:
    router = made.router()
    raw = made.raw(zmq.DEALER, router.address)

    def has_5000() -> bool:
        with contextlib.suppress(zmq.Again):
            for _ in range(500):
                raw.send(b"\xc1", zmq.NOBLOCK)
        router.socket.poll(10)
        router.receive_ready()
        return router.stats.rejected >= 5000

    with caplog.at_level(logging.WARNING):
        wait_until(has_5000)
    assert len(caplog.records) <= 14


def test_frames_over_the_limit_cost_their_sender_the_connection_and_nobody_else_anything(made: Sockets) -> None:
    router = made.router()
    other = made.dealer(router.address, b"other")
    raw = made.raw(zmq.DEALER, router.address, b"raw")
    raw.send(bytes(MAX_FRAME_BYTES + 1))
    other.send(Goodbye(1))
    assert messages(receive([router, other], 1)) == [Goodbye(1)]
    dealer = made.dealer(router.address, PEER)
    with pytest.raises(ProtocolError, match="frame limit"):
        dealer.send(Abort(bytes(16 * 850_000), bytes(4 * 850_000)))
    dealer.send(Goodbye(2))
    assert messages(receive([router, dealer], 1)) == [Goodbye(2)]


def test_a_batch_is_bounded_in_messages_and_bytes(made: Sockets) -> None:
    router = made.router()
    dealer = made.dealer(router.address, PEER)
    large = Abort(bytes(16 * 500_000), bytes(4 * 500_000))
    for _ in range(8):
        dealer.send(large)
    sizes = []

    def has_all() -> bool:
        dealer.flush()
        router.socket.poll(10)
        sizes.append(len(router.receive_ready()))
        return sum(sizes) == 8

    wait_until(has_all)
    assert max(sizes) <= 4  # 32 MiB and the message that passed it
    for number in range(20):
        dealer.send(Goodbye(number))
    router.socket.poll(5000)
    assert 1 <= len(router.receive_ready(most=3)) <= 3


def test_a_flood_from_one_peer_does_not_starve_the_others(made: Sockets) -> None:
    router = made.router()
    flooding = made.dealer(router.address, b"flooding")
    quiet = made.dealer(router.address, b"quiet")
    flooding.send(Goodbye(0))
    receive([router, flooding], 1)
    for _ in range(7999):
        assert flooding.send(Goodbye(0))
    quiet.send(Goodbye(1))
    items = messages(receive([router, flooding, quiet], 8000))
    assert items.index(Goodbye(1)) < 4000


def test_256_peers_are_told_apart(made: Sockets) -> None:
    router = made.router()
    dealers = [made.dealer(router.address, b"peer/%d" % number) for number in range(256)]
    for number, dealer in enumerate(dealers):
        dealer.send(Goodbye(number))
    received = receive([router, *dealers], 256)
    assert {envelope.peer: envelope.message for _, envelope in received} == {
        b"peer/%d" % number: Goodbye(number) for number in range(256)
    }
    for number in range(256):
        assert router.send(b"peer/%d" % number, Goodbye(1000 + number))
    answers: dict[Port, object] = {port: envelope.message for port, envelope in receive(dealers, 256)}
    assert [answers[dealer] for dealer in dealers] == [Goodbye(1000 + number) for number in range(256)]


def test_a_second_live_peer_of_the_same_name_is_not_heard(made: Sockets) -> None:
    router = made.router()
    first = made.dealer(router.address, PEER)
    first.send(Goodbye(1))
    assert messages(receive([router, first], 1)) == [Goodbye(1)]
    second = made.dealer(router.address, PEER)
    second.send(Goodbye(2))
    receive_nothing_for_a_while(router, second)
    first.send(Goodbye(3))
    assert messages(receive([router, first, second], 1)) == [Goodbye(3)]


def test_the_last_message_before_closing_arrives_if_asked_for(made: Sockets) -> None:
    router = made.router()
    dealer = made.dealer(router.address, PEER)
    dealer.send(Goodbye(1))
    receive([router, dealer], 1)
    dealer.send(Goodbye(2))
    dealer.close(linger_ms=2000)
    assert messages(receive([router], 1)) == [Goodbye(2)]


def receive_nothing_for_a_while(*ports: Port) -> None:
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        for port in ports:
            port.socket.poll(20)
            assert port.receive_ready() == []
