"""Peers that die, stall, come back, speak garbage or an old version: what a port does about each."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from services.runtime.session import HEARTBEAT_INTERVAL_S, HandshakeError, SchedulerSession
from services.wire import transport
from services.wire.codec import encode
from services.wire.endpoints import Identity
from services.wire.members import ForeignHello, Goodbye, HandshakeRefused, Heartbeat, Hello, Role, State, Welcome
from services.wire.messages import PROTOCOL_VERSION
from services.wire.transport import DealerPort, RouterPort
from tests.sockets import Sockets, messages, receive, wait_until

REPOSITORY = Path(__file__).parents[2]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_peer() -> Iterator[Start]:
    """Starts a peer process and waits until it is ready; none outlives its test, not even a stopped one."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.faults.wire_peer", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def fill(router: RouterPort, peer: bytes) -> int:
    """Sends numbered messages until the port says that the peer takes no more; returns how many it took."""
    sent = 0
    while router.send(peer, Goodbye(sent + 1)):
        sent += 1
        assert sent < 200_000
    return sent


def test_a_killed_peer_is_noticed_and_its_successor_is_served(made: Sockets, start_peer: Start) -> None:
    router = made.router()
    process = start_peer("count", router.address, "first")
    assert messages(receive([router], 1)) == [Goodbye(0)]
    kill(process)

    def is_gone() -> bool:
        router.socket.poll(10)
        return not router.send(b"first", Goodbye(1))

    wait_until(is_gone)
    assert not router.has_outbox
    process = start_peer("count", router.address, "second")
    receive([router], 1)
    assert router.send(b"second", Goodbye(5))
    assert process.stdout is not None
    assert process.stdout.readline() == "5\n"


def test_a_stalled_peer_never_blocks_the_others_and_misses_nothing_that_was_taken(
    made: Sockets, start_peer: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_MAX_OUTBOX_FRAMES", 500)
    router = made.router()
    stalled = start_peer("count", router.address, "stalled")
    healthy = start_peer("count", router.address, "healthy")
    receive([router], 2)
    stalled.send_signal(signal.SIGSTOP)
    sent = fill(router, b"stalled")
    assert router.stats.outbox_frames == 500

    assert healthy.stdout is not None
    for number in range(100):
        started = time.process_time()
        assert router.send(b"healthy", Goodbye(number))
        assert not router.send(b"stalled", Goodbye(number))
        assert time.process_time() - started < 0.1
        assert healthy.stdout.readline() == f"{number}\n"

    stalled.send_signal(signal.SIGCONT)

    def outbox_is_empty() -> bool:
        router.socket.poll(5)
        router.flush()
        return not router.has_outbox

    wait_until(outbox_is_empty)
    assert stalled.stdout is not None
    assert [int(stalled.stdout.readline()) for _ in range(sent)] == list(range(1, sent + 1))


def test_a_stalled_peer_that_is_given_up_holds_no_memory(
    made: Sockets, start_peer: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_MAX_OUTBOX_FRAMES", 100)
    router = made.router()
    process = start_peer("count", router.address, "stalled")
    receive([router], 1)
    process.send_signal(signal.SIGSTOP)
    fill(router, b"stalled")
    router.forget(b"stalled")
    assert (router.stats.outbox_frames, router.has_outbox) == (0, False)


def test_a_server_killed_and_started_again_is_found_again(made: Sockets, start_peer: Start) -> None:
    """What the dead one had been handed is lost; what comes after is not, and keeps its order."""
    endpoint = made.endpoint("echo")
    process = start_peer("echo", endpoint)
    dealer = made.dealer(endpoint, b"me")
    dealer.send(Goodbye(1))
    assert messages(receive([dealer], 1)) == [Goodbye(1)]
    for number in range(3):
        kill(process)
        first = 100 * (number + 1)
        wait_until(lambda first=first: waits_in_the_outbox(dealer, first))  # type: ignore[misc]
        for item in range(first + 1, first + 50):
            assert dealer.send(Goodbye(item))
        process = start_peer("echo", endpoint)
        received = [item.epoch for item in messages(receive([dealer], 50)) if isinstance(item, Goodbye)]
        assert received[-50:] == list(range(first, first + 50))


def waits_in_the_outbox(dealer: DealerPort, number: int) -> bool:
    """Whether the port has noticed that nobody is there; a message sent before is lost with the peer."""
    dealer.socket.poll(10)
    if dealer.socket.poll(0, zmq.POLLOUT):
        return False
    dealer.send(Goodbye(number))
    return dealer.has_outbox


def test_an_old_process_is_refused_by_name_and_ends(made: Sockets) -> None:
    """Its Hello has another shape, too; the refusal has the shape that every version knows."""
    router = made.router()
    old = made.raw(zmq.DEALER, router.address, b"tokenizer/old/0000000000000001")
    old.send(msgpack.packb([1, PROTOCOL_VERSION + 7, "tokenizer", ["a", {"new": "shape"}]]))
    [(_, envelope)] = receive([router], 1)
    assert envelope.message == ForeignHello(PROTOCOL_VERSION + 7)
    router.send(envelope.peer, HandshakeRefused(PROTOCOL_VERSION, "the scheduler speaks protocol 1"))
    assert old.poll(5000)
    assert msgpack.unpackb(old.recv()) == [3, PROTOCOL_VERSION, "the scheduler speaks protocol 1"]


def test_a_new_process_is_refused_by_an_old_scheduler(made: Sockets) -> None:
    session = SchedulerSession(Identity(Role.TOKENIZER, "t"), "", dict, 0.0)
    scheduler = made.router()
    dealer = made.dealer(scheduler.address, session.identity.routing_id)
    for message in session.messages_due(0.0):
        dealer.send(message)
    [(_, envelope)] = receive([scheduler, dealer], 1)
    assert isinstance(envelope.message, Hello)
    scheduler.send(envelope.peer, HandshakeRefused(0, "protocol 1, the scheduler speaks 0"))
    [(_, envelope)] = receive([dealer], 1)
    with pytest.raises(HandshakeError, match="the scheduler speaks 0"):
        session.receive(envelope.message, 0.1)


def test_a_process_joins_again_when_the_scheduler_is_another(made: Sockets) -> None:
    """The whole way over sockets: welcome, the scheduler's death, its successor's heartbeat, a second welcome."""
    session = SchedulerSession(Identity(Role.DETOKENIZER, "d"), "", dict, 0.0)
    scheduler = made.router()
    dealer = made.dealer(scheduler.address, session.identity.routing_id)
    dealer.send(session.messages_due(0.0)[0])
    [(_, envelope)] = receive([scheduler, dealer], 1)
    scheduler.send(envelope.peer, Welcome(PROTOCOL_VERSION, 11))
    session.receive(messages(receive([dealer], 1))[0], 0.1)
    assert isinstance(session.messages_due(0.1)[0], Heartbeat)
    scheduler.close()

    successor = made.router()
    now_s = 0.1
    heard: list[object] = []

    def is_heard() -> bool:
        """Heartbeats that went into the dead connection are lost; the session goes on sending them."""
        nonlocal now_s
        now_s += HEARTBEAT_INTERVAL_S
        for message in session.messages_due(now_s):
            dealer.send_now(message)
        successor.socket.poll(20)
        heard.extend(envelope.message for envelope in successor.receive_ready())
        return bool(heard)

    wait_until(is_heard)
    assert isinstance(heard[0], Heartbeat)  # a stranger's, for this scheduler: it answers with its own
    successor.send(session.identity.routing_id, Heartbeat(12, State.READY, 0))
    session.receive(messages(receive([dealer], 1))[0], now_s)
    [greeting] = session.messages_due(now_s)
    assert isinstance(greeting, Hello)
    dealer.send(greeting)
    receive([successor, dealer], 1)
    successor.send(session.identity.routing_id, Welcome(PROTOCOL_VERSION, 12))
    session.receive(messages(receive([dealer], 1))[0], now_s)
    assert session.scheduler_epoch == 12


def test_garbage_from_one_peer_costs_the_others_nothing(made: Sockets, start_peer: Start) -> None:
    endpoint = made.endpoint("echo")
    start_peer("echo", endpoint)
    raw = made.raw(zmq.DEALER, endpoint, b"garbage")
    frame = encode(Goodbye(1))
    for number in range(400):
        raw.send_multipart(
            [[b""], [frame[: number % len(frame)]], [frame, frame], [bytes([number % 256]) * 9]][number % 4]
        )
    dealer = made.dealer(endpoint, b"good")
    for number in range(10):
        dealer.send(Goodbye(number))
    assert messages(receive([dealer], 10)) == [Goodbye(number) for number in range(10)]
