"""scheduler: who belongs to the group. Pure: the shell brings the clock and the sockets.

Every other process greets the scheduler, is told of the others by the roster, and is a member as long as it is heard.
The newest greeting of an instance wins; a process that was declared lost may not come back under its old epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.runtime.session import SILENCE_LIMIT_S, STARTING_SILENCE_LIMIT_S
from services.wire.endpoints import parse_routing_id
from services.wire.members import Heartbeat, Hello, Member, MemberTelemetry, Role, Roster, State, WorkerCard
from services.wire.messages import PROTOCOL_VERSION


@dataclass(slots=True)
class Peer:
    """One live process, as last heard."""

    routing_id: bytes
    hello: Hello
    state: State
    heard_s: float
    silence_limit_s: float = SILENCE_LIMIT_S
    progress: int = 0
    metrics: bytes = b""

    @property
    def role(self) -> Role:
        """What kind of process it is."""
        return self.hello.role

    @property
    def name(self) -> str:
        """How logs call it."""
        return f"{self.hello.role} {self.hello.instance}"

    @property
    def may_be_silent_s(self) -> float:
        """How long it need not be heard at present: longer while it loads, or while its loop waits for a step."""
        return STARTING_SILENCE_LIMIT_S if self.state == State.STARTING else self.silence_limit_s

    @property
    def card(self) -> WorkerCard | None:
        """What a worker brought; None for others and for a worker that is not ready to say."""
        return self.hello.worker


class GreetingRefusedError(Exception):
    """A process that may not join; the message is told to it."""


class Membership:
    """The live members, by routing id."""

    def __init__(self) -> None:
        self.peers: dict[bytes, Peer] = {}
        self.generation = 0

    def greet(self, routing_id: bytes, hello: Hello, now_s: float) -> Peer | None:
        """Takes a greeting.

        Returns:
            The peer that this one replaces: an older process of the same role and instance.

        Raises:
            GreetingRefusedError: another protocol, or an identity that is not the socket's own.
        """
        if hello.version != PROTOCOL_VERSION:
            raise GreetingRefusedError(f"protocol {hello.version}, the scheduler speaks {PROTOCOL_VERSION}")
        identity = parse_routing_id(routing_id)
        if identity is None or hello.role == Role.SCHEDULER or identity.routing_id != routing_id:
            raise GreetingRefusedError("no name that a member can have")
        if (identity.role, identity.instance, identity.epoch) != (hello.role, hello.instance, hello.epoch):
            raise GreetingRefusedError("the greeting names another process than the socket")
        known = self.peers.get(routing_id)
        if known is not None:
            known.heard_s = now_s
            if known.hello != hello:
                known.hello, known.state = hello, hello.state
                self.generation += 1
            return None
        replaced = next(
            (peer for peer in self.peers.values() if (peer.role, peer.hello.instance) == (hello.role, hello.instance)),
            None,
        )
        self.peers[routing_id] = Peer(routing_id, hello, hello.state, now_s)
        self.generation += 1
        return replaced

    def hear(self, peer: Peer, heartbeat: Heartbeat) -> None:
        """Takes a heartbeat of a member."""
        if peer.state != heartbeat.state:
            peer.state = heartbeat.state
            self.generation += 1
        peer.progress = heartbeat.progress
        peer.metrics = heartbeat.metrics

    def remove(self, peer: Peer) -> None:
        """A member left, was replaced or is lost."""
        if self.peers.pop(peer.routing_id, None) is not None:
            self.generation += 1

    def silent(self, now_s: float) -> list[Peer]:
        """Members not heard for longer than their limit."""
        return [peer for peer in self.peers.values() if now_s - peer.heard_s > peer.may_be_silent_s]

    def of(self, role: Role) -> list[Peer]:
        """The live members of a role."""
        return [peer for peer in self.peers.values() if peer.role == role]

    def roster(self) -> Roster:
        """What every member is told at every change."""
        members = (
            Member(peer.role, peer.hello.instance, peer.hello.epoch, peer.hello.address, peer.state)
            for peer in self.peers.values()
        )
        return Roster(self.generation, tuple(members))

    def telemetry(self, now_s: float) -> tuple[MemberTelemetry, ...]:
        """The last heartbeat of every member."""
        return tuple(
            MemberTelemetry(
                role=peer.role,
                instance=peer.hello.instance,
                epoch=peer.hello.epoch,
                state=peer.state,
                age_ms=int(1000 * max(0.0, now_s - peer.heard_s)),
                progress=peer.progress,
                metrics=peer.metrics,
                silence_limit_ms=int(1000 * peer.may_be_silent_s),
            )
            for peer in self.peers.values()
        )
