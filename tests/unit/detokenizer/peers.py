"""A real detokenizer process among peers that the test plays: a scheduler and tokenizers on real sockets."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import zmq

from services.runtime.session import HEARTBEAT_INTERVAL_S
from services.wire.endpoints import Identity, ipc_endpoint
from services.wire.members import Heartbeat, Hello, Member, Role, Roster, State, Welcome
from services.wire.messages import PROTOCOL_VERSION
from services.wire.transport import RouterPort

T = TypeVar("T")
DEADLINE_S = 30.0
ROOT = Path(__file__).parents[3]


class Peer(threading.Thread):
    """A bound ROUTER in a thread of its own: keeps what arrives, sends what the test hands it."""

    def __init__(self, identity: Identity, run_dir: Path, name: str) -> None:
        super().__init__(daemon=True)
        self.identity = identity
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._port = RouterPort(self._context, ipc_endpoint(run_dir, name))
        self.address = self._port.address
        self._outgoing: deque[tuple[bytes, object]] = deque()
        self._arrived: list[object] = []
        self._condition = threading.Condition()
        self._is_stopping = False

    @property
    def member(self) -> Member:
        return Member(self.identity.role, self.identity.instance, self.identity.epoch, self.address, State.READY)

    def run(self) -> None:
        while not self._is_stopping:
            self.tick()
            while self._outgoing:
                peer, item = self._outgoing.popleft()
                if isinstance(item, list):
                    self._port.socket.send_multipart([peer, *item])
                else:
                    self._port.send(peer, item)
            self._port.socket.poll(10)
            envelopes = self._port.receive_ready()
            for envelope in envelopes:
                self.answer(envelope.peer, envelope.message)
            with self._condition:
                self._arrived.extend(envelope.message for envelope in envelopes)
                self._condition.notify_all()
        self._port.close()
        self._context.term()

    def tick(self) -> None:
        """What this kind of peer does of itself."""

    def answer(self, sender: bytes, message: object) -> None:
        """How this kind of peer answers."""

    def send(self, peer: bytes, item: object) -> None:
        """A message, or a list of raw frames."""
        self._outgoing.append((peer, item))

    def wait_until(self, find: Callable[[Sequence[object]], T | None]) -> T:
        """What `find` makes of all that has arrived, once it is not None."""
        with self._condition:
            found: T | None = None
            deadline = time.monotonic() + DEADLINE_S
            while (found := find(self._arrived)) is None:
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"in vain; last arrived: {[type(item).__name__ for item in self._arrived[-50:]]}"
                self._condition.wait(left_s)
            return found

    def received(self, kind: type[T]) -> list[T]:
        """The messages of a type that have arrived so far."""
        with self._condition:
            return [message for message in self._arrived if isinstance(message, kind)]

    def stop(self) -> None:
        self._is_stopping = True
        self.join(DEADLINE_S)


class FakeScheduler(Peer):
    """Welcomes, sends rosters and heartbeats until silenced, and keeps all it hears."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(Identity(Role.SCHEDULER, "s"), run_dir, "scheduler")
        self.detokenizer = b""
        self.is_silent = False
        self.tells_states = True
        self.refusal: object | None = None
        self._tokenizers: tuple[Member, ...] = ()
        self._own: tuple[Member, ...] = ()
        self._next_heartbeat_s = 0.0

    def tick(self) -> None:
        now_s = time.monotonic()
        if self.detokenizer and not self.is_silent and now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + HEARTBEAT_INTERVAL_S
            self._port.send(self.detokenizer, Heartbeat(self.identity.epoch, State.READY, 0))

    def answer(self, sender: bytes, message: object) -> None:
        if isinstance(message, Hello):
            if self.refusal is not None:
                self._port.send(sender, self.refusal)
                return
            self.detokenizer = sender
            self._port.send(sender, Welcome(PROTOCOL_VERSION, self.identity.epoch))
            self._tell_state(message.instance, message.epoch, message.state)
        elif isinstance(message, Heartbeat):
            known = self._own[0]
            if known.state != message.state and self.tells_states:
                self._tell_state(known.instance, message.epoch, message.state)

    def start_anew(self) -> None:
        """What the detokenizer sees of a scheduler that was restarted: heartbeats of another epoch."""
        self.identity = Identity(Role.SCHEDULER, "s")

    def _tell_state(self, instance: str, epoch: int, state: State) -> None:
        self._own = (Member(Role.DETOKENIZER, instance, epoch, "", state),)
        self.tell_roster(self._tokenizers)

    def tell_roster(self, tokenizers: Sequence[Member]) -> None:
        self._tokenizers = tuple(tokenizers)
        self.send(self.detokenizer, Roster(1, (*self._own, *self._tokenizers)))


class Group:
    """The process under test and its peers."""

    def __init__(self, model: Path, *flags: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tw-")
        self.run_dir = Path(self._folder.name)
        self.scheduler = FakeScheduler(self.run_dir)
        self.scheduler.start()
        self.tokenizers: list[Peer] = []
        command = [sys.executable, "-m", "services.detokenizer", "--model", str(model), "--run-dir", self._folder.name]
        self.process = subprocess.Popen([*command, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def add_tokenizer(self) -> Peer:
        name = f"t{len(self.tokenizers)}"
        peer = Peer(Identity(Role.TOKENIZER, name), self.run_dir, name)
        peer.start()
        self.tokenizers.append(peer)
        self.scheduler.wait_until(lambda arrived: any(isinstance(item, Hello) for item in arrived) or None)
        self.tell_roster()
        return peer

    def tell_roster(self) -> None:
        self.scheduler.tell_roster([peer.member for peer in self.tokenizers])

    def send(self, *messages: object) -> None:
        """From the scheduler to the detokenizer."""
        for message in messages:
            self.scheduler.send(self.scheduler.detokenizer, message)

    def exit_status(self) -> tuple[int, str]:
        """Waits for the process to end; its status and what it wrote."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        for peer in (self.scheduler, *self.tokenizers):
            peer.stop()
        self._folder.cleanup()
