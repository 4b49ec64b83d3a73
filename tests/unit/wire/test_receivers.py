"""Waiting for messages: deadlines, wake-ups, signals, and the edges that ZeroMQ's descriptor does not show."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
import zmq

from services.wire.codec import encode
from services.wire.members import Goodbye
from services.wire.transport import AsyncReceiver, BlockingReceiver, DealerPort, Port, RouterPort
from tests.sockets import DEADLINE_S, Sockets, messages, receive

Runner = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Runs a coroutine; fails when it takes longer than the deadline of all tests."""
    runner: Callable[[Coroutine[Any, Any, None]], None] = request.param
    return lambda coroutine: runner(asyncio.wait_for(coroutine, DEADLINE_S))


def connected_pair(made: Sockets, name: str = "a") -> tuple[RouterPort, DealerPort]:
    router = made.router(made.endpoint(name))
    dealer = made.dealer(router.address, name.encode())
    dealer.send(Goodbye(0))
    receive([router, dealer], 1)
    return router, dealer


# ---------------------------------------------------------------- blocking


def test_a_blocking_wait_ends_with_the_first_message_or_the_time(made: Sockets) -> None:
    router, dealer = connected_pair(made)
    receiver = BlockingReceiver([router])
    assert receiver.receive_batch(0) == []
    started = time.monotonic()
    assert receiver.receive_batch(0.05) == []
    assert time.monotonic() - started >= 0.05
    timer = threading.Timer(0.05, dealer.send, [Goodbye(1)])
    timer.start()
    assert messages(receiver.receive_batch(DEADLINE_S)) == [Goodbye(1)]
    timer.join()


def test_a_blocking_wait_sends_what_waits_meanwhile(made: Sockets) -> None:
    dealer = made.dealer(made.endpoint(), b"d")
    dealer.send(Goodbye(1))
    router = made.router()
    thread = threading.Thread(target=BlockingReceiver([dealer]).receive_batch, args=[2])
    thread.start()
    assert messages(receive([router], 1)) == [Goodbye(1)]
    router.send(b"d", Goodbye(2))
    thread.join()


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_blocking_wait_can_be_interrupted(made: Sockets, when: str) -> None:
    router, dealer = connected_pair(made)
    receiver = BlockingReceiver([router])
    if when == "before":
        for _ in range(100_000):
            receiver.interrupt()  # more than its pipe holds
    else:
        threading.Timer(0.05, receiver.interrupt).start()
    started = time.monotonic()
    assert receiver.receive_batch(DEADLINE_S) == []
    assert time.monotonic() - started < DEADLINE_S / 2
    dealer.send(Goodbye(1))
    received: list[object] = []
    while not received:
        received = messages(receiver.receive_batch(DEADLINE_S))
    assert received == [Goodbye(1)]


def test_a_signal_ends_a_blocking_wait_through_its_handler(made: Sockets) -> None:
    router, _ = connected_pair(made)
    receiver = BlockingReceiver([router])
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: receiver.interrupt())
    try:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        started = time.monotonic()
        assert receiver.receive_batch(DEADLINE_S) == []
        assert time.monotonic() - started < DEADLINE_S / 2
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_a_blocking_wait_follows_ports_that_come_and_go(made: Sockets) -> None:
    first, to_first = connected_pair(made, "a")
    second, to_second = connected_pair(made, "b")
    receiver = BlockingReceiver([first])
    receiver.add(second)
    timer = threading.Timer(0.05, to_second.send, [Goodbye(2)])
    timer.start()
    assert messages(receiver.receive_batch(DEADLINE_S)) == [Goodbye(2)]
    timer.join()
    receiver.remove(second)
    second.close()
    to_first.send(Goodbye(1))
    assert messages(receiver.receive_batch(DEADLINE_S)) == [Goodbye(1)]
    receiver.remove(first)
    assert receiver.receive_batch(0) == []


def test_blocking_receivers_leave_no_descriptors_behind(made: Sockets) -> None:
    router, _ = connected_pair(made)
    BlockingReceiver([router])
    before = len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))
    for _ in range(50):
        BlockingReceiver([router])
    assert len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")) <= before


# ---------------------------------------------------------------- asyncio


async def receive_async(receiver: AsyncReceiver, count: int) -> list[tuple[Port, object]]:
    received: list[tuple[Port, object]] = []
    while len(received) < count:
        batch = await receiver.receive_batch(DEADLINE_S)
        received += [(port, envelope.message) for port, envelope in batch]
    return received


def test_no_message_is_overlooked_while_sends_take_the_edges(made: Sockets, run: Runner) -> None:
    pairs = [connected_pair(made, name) for name in "abc"]

    async def main() -> None:
        receiver = AsyncReceiver()
        for router, dealer in pairs:
            receiver.add(router)
            receiver.add(dealer)
        for number in range(1, 400):  # ping-pong: each message follows from the one before
            for _, dealer in pairs:
                dealer.send(Goodbye(number))
            for port, message in await receive_async(receiver, 3):
                assert isinstance(port, RouterPort)
                assert port.send(b"abc"[[r for r, _ in pairs].index(port)].to_bytes(), message)
            assert [message for _, message in await receive_async(receiver, 3)] == [Goodbye(number)] * 3

    run(main())


def test_a_send_that_fails_does_not_hide_what_arrived(made: Sockets, run: Runner) -> None:
    """An attempt takes the descriptor's edge even if nothing can be sent."""
    router, dealer = connected_pair(made)

    async def main() -> None:
        receiver = AsyncReceiver()
        receiver.add(router)
        for number in range(200):
            waiting = asyncio.ensure_future(receiver.receive_batch(DEADLINE_S))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            dealer.send(Goodbye(number))
            for _ in range(20):
                assert not router.send(b"nobody", Goodbye(0))
            started = time.monotonic()
            batch = await waiting or await receiver.receive_batch(DEADLINE_S)
            assert messages(batch) == [Goodbye(number)]
            assert time.monotonic() - started < DEADLINE_S / 4

    run(main())


def test_messages_behind_a_batch_of_garbage_are_found_at_once(made: Sockets, run: Runner) -> None:
    router = made.router()
    raw = made.raw(zmq.DEALER, router.address, b"raw")
    for _ in range(512):  # exactly one batch
        raw.send(b"\xc1")
    raw.send(encode(Goodbye(1)))

    async def main() -> None:
        receiver = AsyncReceiver()
        router.socket.poll(5000)
        receiver.add(router)
        assert await receive_async(receiver, 1) == [(router, Goodbye(1))]
        assert router.stats.rejected == 512

    run(main())


def test_a_flood_does_not_keep_the_loop_from_its_other_tasks(made: Sockets, run: Runner) -> None:
    router, dealer = connected_pair(made)

    async def main() -> None:
        receiver = AsyncReceiver()
        receiver.add(router)
        turns = 0

        async def other_task() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other_task())
        for batch in range(50):
            dealer.send(Goodbye(batch))
            await receiver.receive_batch(DEADLINE_S)
        assert turns >= 50
        task.cancel()

    run(main())


def test_the_loop_does_not_spin_while_nobody_receives(
    made: Sockets, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, dealer = connected_pair(made)
    calls = 0
    real = AsyncReceiver._on_readable

    def counted(self: AsyncReceiver, port: Port) -> None:
        nonlocal calls
        calls += 1
        real(self, port)

    monkeypatch.setattr(AsyncReceiver, "_on_readable", counted)

    async def main() -> None:
        receiver = AsyncReceiver()
        receiver.add(router)
        dealer.send(Goodbye(1))
        assert select.select([router.file_descriptor], [], [], DEADLINE_S)[0]  # the edge is there, and stays there
        for _ in range(1000):
            await asyncio.sleep(0)
        assert calls < 20
        assert await receive_async(receiver, 1) == [(router, Goodbye(1))]

    run(main())


def test_an_async_wait_ends_with_the_time_or_an_interrupt(made: Sockets, run: Runner) -> None:
    router, _ = connected_pair(made)

    async def main() -> None:
        receiver = AsyncReceiver()
        receiver.add(router)
        started = time.monotonic()
        assert await receiver.receive_batch(0.05) == []
        assert time.monotonic() - started >= 0.045
        receiver.interrupt()
        assert await receiver.receive_batch(DEADLINE_S) == []
        threading.Timer(0.05, receiver.interrupt).start()
        assert await receiver.receive_batch(DEADLINE_S) == []
        assert time.monotonic() - started < DEADLINE_S / 2

    run(main())


def test_a_signal_ends_an_async_wait_through_its_handler(made: Sockets, run: Runner) -> None:
    router, _ = connected_pair(made)

    async def main() -> None:
        receiver = AsyncReceiver()
        receiver.add(router)
        signal.signal(signal.SIGUSR1, lambda number, frame: receiver.interrupt())
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        started = time.monotonic()
        assert await receiver.receive_batch(DEADLINE_S) == []
        assert time.monotonic() - started < DEADLINE_S / 2

    previous = signal.getsignal(signal.SIGUSR1)
    try:
        run(main())
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_a_cancelled_wait_loses_nothing(made: Sockets, run: Runner) -> None:
    router, dealer = connected_pair(made)

    async def main() -> None:
        receiver = AsyncReceiver()
        receiver.add(router)
        for number in range(50):
            waiting = asyncio.ensure_future(receiver.receive_batch(DEADLINE_S))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            dealer.send(Goodbye(number))
            router.socket.poll(5000)
            waiting.cancel()
            got = [item.message for _, item in waiting.result()] if await is_done(waiting) else []
            if not got:
                got = [message for _, message in await receive_async(receiver, 1)]
            assert got == [Goodbye(number)]

    async def is_done(task: asyncio.Future[Any]) -> bool:
        await asyncio.wait([task])
        return not task.cancelled()

    run(main())


def test_a_removed_port_is_watched_no_more(made: Sockets, run: Runner) -> None:
    router, dealer = connected_pair(made)
    other, other_dealer = connected_pair(made, "b")

    async def main() -> None:
        receiver = AsyncReceiver()
        receiver.add(router)
        receiver.add(other)
        receiver.remove(router)
        dealer.send(Goodbye(1))
        other_dealer.send(Goodbye(2))
        assert await receive_async(receiver, 1) == [(other, Goodbye(2))]
        assert router.look_again is None

    run(main())
