"""gpu_worker: who of a group lives. A rank that ends or falls silent ends all others within seconds, by name.

    rank 0 ══ one connection each ══ ranks 1 .. n       beats both ways, from a thread of each process

Collectives alone do not tell: one on a device waits for ever for a rank that was killed, and none is under way while
nobody asks for anything. The connections are the kernel's, which closes them when a process dies however it dies; a
process that was stopped sends no beats.

The thread owns the connections. What it finds it gives to `on_lost`, which has to end the process: the main thread may
wait in a collective and never come back.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum

BEAT_INTERVAL_S = 0.25
SILENCE_LIMIT_S = 5.0
"""Less than the scheduler's patience with a step: the log names the rank before the worker is lost."""
STARTING_SILENCE_LIMIT_S = 60.0
MEET_TIMEOUT_S = 600.0
"""How long ranks wait for each other at the start: hosts may be started by hand, one after another."""
_CONNECT_TIMEOUT_S = 10.0
_GREETING_TIMEOUT_S = 5.0
_SEE_OFF_S = 1.0
_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI")
_FRAME = struct.Struct("<BI")

logger = logging.getLogger(__name__)


class _Kind(IntEnum):
    BEAT = 1
    """With how many commands this rank has taken."""
    STOP = 2
    """This rank was told to stop."""
    END = 3
    """This rank ends as it should."""
    LOST = 4
    """The rank of this number is lost."""


@dataclass(slots=True)
class _Peer:
    rank: int
    connection: socket.socket
    heard_s: float
    num_taken: int = 0
    has_ended: bool = False
    unread: bytes = b""


@dataclass(slots=True)
class WatchEvents:
    """What the thread calls; each must not wait.

    Attributes:
        on_lost: with what has happened, naming the rank.
        on_stop: another rank was told to stop.
        on_end: rank 0 ends as it should.
    """

    on_lost: Callable[[str], None]
    on_stop: Callable[[], None] = field(default=lambda: None)
    on_end: Callable[[], None] = field(default=lambda: None)


class Watch:
    """The connections of one rank. Made by `Lookout.wait` on rank 0 and by `join_watch` on the others."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], events: WatchEvents) -> None:
        """Starts the thread; `connections` by the rank at the other end."""
        now_s = time.monotonic()
        self._rank = rank
        self._events = events
        self._peers = [_Peer(other, connection, now_s) for other, connection in sorted(connections.items())]
        for connection in connections.values():
            connection.setblocking(False)
        self._wake_sender, self._wake_receiver = socket.socketpair()
        for end in (self._wake_sender, self._wake_receiver):
            end.setblocking(False)
        self._silence_limit_s = STARTING_SILENCE_LIMIT_S
        self._num_taken = 0
        self._is_told_to_stop = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def be_strict(self) -> None:
        """The group serves: from here on nobody may be silent for longer than `SILENCE_LIMIT_S`."""
        self._silence_limit_s = SILENCE_LIMIT_S

    def note_taken(self) -> None:
        """One more command was taken by this rank."""
        self._num_taken += 1

    def describe_behind(self) -> str:
        """The ranks that have taken fewer commands than this one, as words for a message; "" if none has."""
        behind = [f"rank {peer.rank}" for peer in self._peers if peer.num_taken < self._num_taken]
        return f"{' and '.join(behind)} did not come as far" if behind else ""

    def tell_stop(self) -> None:
        """This rank was told to stop: tells the others. Safe in a signal handler."""
        self._is_told_to_stop = True
        self._wake()

    def close(self) -> None:
        """This rank ends as it should: tells the others, and ends the thread.

        Rank 0 stays for a moment: what it has sent last would be lost with its connections.
        """
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._wake_sender.close()
        self._wake_receiver.close()

    def _wake(self) -> None:
        with suppress(OSError):  # it is full: the thread wakes anyway
            self._wake_sender.send(b"w")

    def _run(self) -> None:
        told_s = 0.0
        while not self._is_closing:
            if self._is_told_to_stop:
                self._is_told_to_stop = False
                self._tell(_Kind.STOP, self._rank)
            if time.monotonic() - told_s >= BEAT_INTERVAL_S:
                told_s = time.monotonic()
                self._tell(_Kind.BEAT, self._num_taken & 0xFFFFFFFF)
            self._listen()
            self._look_at_silence()
        self._tell(_Kind.END, self._rank)
        if self._rank == 0:
            self._see_off()
        for peer in self._peers:
            peer.connection.close()

    def _see_off(self) -> None:
        """Waits until the others have ended too, for a short time."""
        deadline_s = time.monotonic() + _SEE_OFF_S
        while any(not peer.has_ended for peer in self._peers) and time.monotonic() < deadline_s:
            self._listen()

    def _listen(self) -> None:
        here = {peer.connection: peer for peer in self._peers if not peer.has_ended}
        readable, _, _ = select.select([*here, self._wake_receiver], [], [], BEAT_INTERVAL_S)
        for source in readable:
            if source is self._wake_receiver:
                self._wake_receiver.recv(4096)
            else:
                self._receive(here[source])

    def _receive(self, peer: _Peer) -> None:
        try:
            received = peer.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            peer.has_ended = True
            self._lose(peer.rank, "has ended: its connection is closed")
            return
        peer.heard_s = time.monotonic()
        peer.unread += received
        while len(peer.unread) >= _FRAME.size and not peer.has_ended:
            kind, number = _FRAME.unpack_from(peer.unread)
            peer.unread = peer.unread[_FRAME.size :]
            self._take(peer, kind, number)

    def _take(self, peer: _Peer, kind: int, number: int) -> None:
        if kind == _Kind.BEAT:
            peer.num_taken = number
        elif kind == _Kind.STOP:
            self._events.on_stop()
        elif kind == _Kind.END:
            peer.has_ended = True
            if peer.rank == 0:
                self._events.on_end()
            else:
                self._lose(peer.rank, "has left")
        elif kind == _Kind.LOST:
            self._lose(number, "is lost, as rank 0 tells")

    def _look_at_silence(self) -> None:
        limit_s, now_s = self._silence_limit_s, time.monotonic()
        for peer in self._peers:
            if not peer.has_ended and now_s - peer.heard_s > limit_s:
                peer.has_ended = True
                self._lose(peer.rank, f"has said nothing for {limit_s:g} s")

    def _lose(self, rank: int, how: str) -> None:
        if self._is_closing:
            return
        self._tell(_Kind.LOST, rank)
        self._events.on_lost(f"rank {rank} {how}")

    def _tell(self, kind: _Kind, number: int) -> None:
        for peer in self._peers:
            if not peer.has_ended:
                with suppress(OSError):  # whoever takes nothing is silent too, which is seen
                    peer.connection.send(_FRAME.pack(kind, number))


class Lookout:
    """Rank 0 before the others have come: a port, and a token that those who may connect know."""

    def __init__(self, address: str) -> None:
        """Binds a free port of an address, or of all addresses where that one is none of this host's (a service's)."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((address, 0))
        except OSError:
            self._listener.bind(("::" if family == socket.AF_INET6 else "", 0))
        self._listener.listen()
        self._token = secrets.token_bytes(_TOKEN_BYTES)

    @property
    def invitation(self) -> str:
        """What the other ranks must be told: `PORT TOKEN`."""
        return f"{self._listener.getsockname()[1]} {self._token.hex()}"

    def wait(self, size: int, events: WatchEvents) -> Watch:
        """Waits for ranks 1 .. size - 1.

        Raises:
            OSError: somebody did not come in time; says who.
        """
        deadline_s = time.monotonic() + MEET_TIMEOUT_S
        connections: dict[int, socket.socket] = {}
        with self._listener:
            while len(connections) < size - 1:
                self._listener.settimeout(max(0.01, deadline_s - time.monotonic()))
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    missing = [str(rank) for rank in range(1, size) if rank not in connections]
                    raise TimeoutError(f"of rank {', '.join(missing)} nothing came in {MEET_TIMEOUT_S:.0f} s") from None
                connection.settimeout(_GREETING_TIMEOUT_S)
                token, rank = _GREETING.unpack(_received(connection, _GREETING.size))
                if secrets.compare_digest(token, self._token) and 0 < rank < size and rank not in connections:
                    connections[rank] = connection
                else:
                    connection.close()
        return Watch(0, connections, events)


def join_watch(rank: int, address: str, invitation: str, events: WatchEvents) -> Watch:
    """Connects a rank to rank 0; OSError where it cannot."""
    port, token = invitation.split()
    connection = socket.create_connection((address, int(port)), timeout=_CONNECT_TIMEOUT_S)
    connection.sendall(_GREETING.pack(bytes.fromhex(token), rank))
    return Watch(rank, {0: connection}, events)


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, zeros for those that do not come: they are no greeting."""
    received = b""
    with suppress(OSError):
        while len(received) < num_bytes and (more := connection.recv(num_bytes - len(received))):
            received += more
    return received.ljust(num_bytes, b"\0")
