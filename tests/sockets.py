"""Ports for tests that are closed at the end of the test, and waiting with a deadline."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq

from services.wire.endpoints import ipc_endpoint
from services.wire.transport import BlockingReceiver, DealerPort, Envelope, Port, RouterPort

DEADLINE_S = 20.0


class Sockets:
    """Makes ports in one ZeroMQ context, and a directory for their files (with a short path: those are limited)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ports: list[Port] = []
        self._raw_sockets: list[zmq.Socket[bytes]] = []

    def endpoint(self, name: str = "scheduler") -> str:
        return ipc_endpoint(self.directory, name)

    def router(self, endpoint: str = "") -> RouterPort:
        port = RouterPort(self.context, endpoint or self.endpoint())
        self._ports.append(port)
        return port

    def dealer(self, endpoint: str, routing_id: bytes) -> DealerPort:
        port = DealerPort(self.context, endpoint, routing_id)
        self._ports.append(port)
        return port

    def raw(self, kind: int, endpoint: str, routing_id: bytes = b"") -> zmq.Socket[bytes]:
        """A connected socket that sends what it likes."""
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        if routing_id:
            socket.setsockopt(zmq.ROUTING_ID, routing_id)
        socket.connect(endpoint)
        self._raw_sockets.append(socket)
        return socket

    def close(self) -> None:
        for port in self._ports:
            port.close()
        for socket in self._raw_sockets:
            socket.close()
        self.context.destroy(linger=0)


@contextmanager
def sockets() -> Iterator[Sockets]:
    with tempfile.TemporaryDirectory(prefix="tw") as directory:
        made = Sockets(Path(directory))
        try:
            yield made
        finally:
            made.close()


def receive(ports: Sequence[Port], count: int) -> list[tuple[Port, Envelope]]:
    """At least `count` messages from these ports, in the order of their arrival; flushes their outboxes meanwhile."""
    receiver = BlockingReceiver(ports)
    received: list[tuple[Port, Envelope]] = []

    def has_all() -> bool:
        received.extend(receiver.receive_batch(0.05))
        return len(received) >= count

    wait_until(has_all)
    return received


def messages(received: list[tuple[Port, Envelope]]) -> list[object]:
    return [envelope.message for _, envelope in received]


def wait_until(condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
    """Asks until the answer is yes; fails after that time. The condition itself waits for something."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
