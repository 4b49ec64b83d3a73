"""scheduler: how it keeps the group together: greetings, roster, heartbeats, telemetry, and who is gone.

It owns the membership and the times at which members are told something; the shell brings the clock and does what a
departure asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from services.runtime.session import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S
from services.scheduler.membership import GreetingRefusedError, Membership, Peer
from services.wire.endpoints import Identity
from services.wire.members import HandshakeRefused, Heartbeat, Hello, MemberTelemetry, Role, State, Telemetry, Welcome
from services.wire.messages import PROTOCOL_VERSION
from services.wire.samples import pack_samples
from services.wire.transport import RouterPort

TELEMETRY_INTERVAL_S = 1.0
_MAX_REMEMBERED = 1024

logger = logging.getLogger(__name__)


class Group:
    """The members and what they are told about each other.

    Args:
        identity: the scheduler's own.
        port: the socket to all of them.
        snapshot: the scheduler's own metrics.
        now_s: the time.
    """

    def __init__(
        self, identity: Identity, port: RouterPort, snapshot: Callable[[], Mapping[str, float]], now_s: float
    ) -> None:
        self.membership = Membership()
        self.state = State.READY
        self.progress = 0
        self._identity = identity
        self._port = port
        self._snapshot = snapshot
        self._lost: dict[bytes, None] = {}  # in order of loss; their epochs may not come back
        self._told_generation = 0
        self._heartbeat_s = now_s
        self._telemetry_s = now_s

    def greet(self, routing_id: bytes, hello: Hello, now_s: float) -> Peer | None:
        """Lets a process join and welcomes it; returns the older process that it replaces, which is lost.

        Raises:
            GreetingRefusedError: it may not join.
        """
        if routing_id in self._lost:
            raise GreetingRefusedError("it was silent for too long and was declared lost; start it again")
        replaced = self.membership.greet(routing_id, hello, now_s)
        self._port.send(routing_id, Welcome(PROTOCOL_VERSION, self._identity.epoch))
        if self.membership.generation == self._told_generation:
            self._port.send(routing_id, self.membership.roster())  # greeted again: it may have missed the last one
        return replaced

    def refuse(self, routing_id: bytes, reason: str) -> None:
        """Tells a process that it may not join; it ends."""
        logger.warning("refused %r: %s", routing_id, reason)
        self._port.send_now(routing_id, HandshakeRefused(PROTOCOL_VERSION, reason))

    def answer_stranger(self, routing_id: bytes) -> None:
        """Answers a message of a process that is no member: one of a former scheduler's group greets again."""
        if routing_id in self._lost:
            self.refuse(routing_id, "it was silent for too long and was declared lost; start it again")
        else:
            self._port.send_now(routing_id, Heartbeat(self._identity.epoch, self.state, self.progress))

    def remove(self, peer: Peer, is_lost: bool) -> None:
        """A member said goodbye, or is lost: then its epoch may not come back."""
        self.membership.remove(peer)
        self._port.forget(peer.routing_id)
        if is_lost:
            self._lost[peer.routing_id] = None
            if len(self._lost) > _MAX_REMEMBERED:
                del self._lost[next(iter(self._lost))]
        logger.info("%s left", peer.name)

    def tell_roster(self) -> None:
        """Sends the roster to all if it has changed."""
        if self.membership.generation != self._told_generation:
            self._told_generation = self.membership.generation
            roster = self.membership.roster()
            for routing_id in self.membership.peers:
                self._port.send(routing_id, roster)

    def tell_times(self, now_s: float) -> None:
        """Sends heartbeats to all and telemetry to the tokenizers, when due."""
        if now_s >= self._heartbeat_s:
            self._heartbeat_s = now_s + HEARTBEAT_INTERVAL_S
            heartbeat = Heartbeat(self._identity.epoch, self.state, self.progress)
            for routing_id in self.membership.peers:
                self._port.send_now(routing_id, heartbeat)
        if now_s >= self._telemetry_s:
            self._telemetry_s = now_s + TELEMETRY_INTERVAL_S
            telemetry = Telemetry((self._own_telemetry(), *self.membership.telemetry(now_s)))
            for peer in self.membership.of(Role.TOKENIZER):
                self._port.send_now(peer.routing_id, telemetry)

    def drain(self, now_s: float) -> None:
        """Takes no more requests. All are told at once: it may be gone before the next heartbeat."""
        self.state = State.DRAINING
        self._heartbeat_s = now_s
        self.tell_times(now_s)

    def next_s(self) -> float:
        """When `tell_times` is due."""
        return min(self._heartbeat_s, self._telemetry_s)

    def _own_telemetry(self) -> MemberTelemetry:
        identity = self._identity
        metrics = pack_samples(self._snapshot())
        return MemberTelemetry(
            identity.role, identity.instance, identity.epoch, self.state, 0, self.progress, metrics,
            silence_limit_ms=int(1000 * SILENCE_LIMIT_S),
        )  # fmt: skip
