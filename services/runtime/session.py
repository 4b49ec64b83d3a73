"""A process's session with the scheduler, as a pure state machine: greeting, heartbeats, roster, silence.

Every process but the scheduler has one. The shell owns the socket and the clock: it sends what `messages_due` says
(with `send_now`: a stale greeting is worth nothing), passes what arrives to `receive`, and wakes up again after
`next_due_s` at the latest. Heartbeats are thus sent by the work loop itself: a stuck loop goes silent.

A scheduler that was started anew does not know this process: it answers whatever comes with its own Heartbeat, whose
epoch is another one, and the session greets again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from services.wire.endpoints import Identity
from services.wire.members import (
    Goodbye,
    HandshakeRefused,
    Heartbeat,
    Hello,
    Member,
    Role,
    Roster,
    State,
    Welcome,
    WorkerCard,
)
from services.wire.messages import PROTOCOL_VERSION
from services.wire.samples import pack_samples

HEARTBEAT_INTERVAL_S = 0.5
SILENCE_LIMIT_S = 3.0
STARTING_SILENCE_LIMIT_S = 60.0  # a process that loads and warms up has no loop yet that could be stuck

MetricsSnapshot = Callable[[], Mapping[str, float]]


class HandshakeError(Exception):
    """The scheduler does not let this process join; the message is its reason."""


class SchedulerSession:
    """What this process has told the scheduler, and what it knows from it."""

    def __init__(self, identity: Identity, address: str, snapshot: MetricsSnapshot, now_s: float) -> None:
        self.identity = identity
        self.state = State.STARTING
        self.progress = 0
        self.scheduler_epoch: int | None = None
        self.scheduler_state = State.STARTING  # as it last told
        self.members: tuple[Member, ...] = ()
        self._worker_card: WorkerCard | None = None
        self._address = address
        self._snapshot = snapshot
        self._next_send_s = now_s
        self._last_heard_s = now_s

    @property
    def is_welcome(self) -> bool:
        """Whether the scheduler that runs now has accepted this process."""
        return self.scheduler_epoch is not None

    @property
    def worker_card(self) -> WorkerCard | None:
        """What a worker brings; a new one is told by a new greeting, at once."""
        return self._worker_card

    @worker_card.setter
    def worker_card(self, card: WorkerCard | None) -> None:
        if card != self._worker_card:
            self._worker_card = card
            self.scheduler_epoch = None
            self._next_send_s = -math.inf

    def set_state(self, state: State, now_s: float) -> None:
        """Changes the state; it is told at once."""
        if state != self.state:
            self.state = state
            self._next_send_s = now_s

    def next_due_s(self, now_s: float) -> float:
        """Seconds until `messages_due` has something (0 when it has)."""
        return max(0.0, self._next_send_s - now_s)

    def messages_due(self, now_s: float) -> list[object]:
        """The Hello or Heartbeat to send now, or nothing."""
        if now_s < self._next_send_s:
            return []
        self._next_send_s = now_s + HEARTBEAT_INTERVAL_S
        epoch = self.identity.epoch
        if not self.is_welcome:
            identity = self.identity
            return [
                Hello(
                    PROTOCOL_VERSION,
                    identity.role,
                    identity.instance,
                    epoch,
                    self._address,
                    self.state,
                    self._worker_card,
                )
            ]
        return [Heartbeat(epoch, self.state, self.progress, pack_samples(self._snapshot()))]

    def goodbye(self) -> Goodbye:
        """The last message of a process that has drained."""
        return Goodbye(self.identity.epoch)

    def receive(self, item: object, now_s: float) -> bool:
        """Takes a message from the scheduler; True when it concerned the session alone (Roster included).

        Raises:
            HandshakeError: this process may not join.
        """
        self._last_heard_s = now_s
        match item:
            case Welcome(version=version, epoch=epoch):
                if version != PROTOCOL_VERSION:
                    raise HandshakeError(f"the scheduler speaks protocol {version}, this process {PROTOCOL_VERSION}")
                self.scheduler_epoch = epoch
                self._next_send_s = now_s
            case HandshakeRefused(reason=reason):
                raise HandshakeError(reason)
            case Roster(members=members):
                self.members = members
            case Heartbeat(epoch=epoch, state=state):
                self.scheduler_state = state
                if self.is_welcome and epoch != self.scheduler_epoch:
                    self.scheduler_epoch = None
                    self._next_send_s = now_s
            case _:
                return False
        return True

    @property
    def told_state(self) -> State | None:
        """The state that the last roster tells of this process: what the scheduler acts on. None: it is not in it."""
        identity = self.identity
        own = (identity.role, identity.instance, identity.epoch)
        return next((m.state for m in self.members if (m.role, m.instance, m.epoch) == own), None)

    def members_of(self, role: Role) -> tuple[Member, ...]:
        """The live processes of a role, from the last roster."""
        return tuple(member for member in self.members if member.role == role)

    def silent_s(self, now_s: float) -> float:
        """Seconds since the scheduler last said anything."""
        return now_s - self._last_heard_s

    def is_silent(self, now_s: float) -> bool:
        """Whether a scheduler that had welcomed this process has been silent for too long: it is gone, or stuck."""
        return self.is_welcome and self.silent_s(now_s) > SILENCE_LIMIT_S
