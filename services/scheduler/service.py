"""Scheduler process: the shell around the cores.

One blocking poll loop over one ROUTER socket, the only fixed address of the group. A turn takes what arrived, lets the
cores plan, and sends what came of it. It owns the clock and the socket; it must never import torch and decides nothing
that a core, the router or the membership can decide.

    for message in inbox.receive_batch(until the next timer): take(message)
    plan as far ahead as allowed;  send the tokens of this turn;  remove who cannot be reached
    unless that is all that the turn is about: tell what changed, and do what is due by the clock
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import zmq

from services.runtime.service import GroupLostError, Process
from services.scheduler.admission import RequestRefusedError
from services.scheduler.answers import Answers
from services.scheduler.controls import Controls
from services.scheduler.group import Group
from services.scheduler.instruments import SchedulerCollector
from services.scheduler.journeys import Journeys
from services.scheduler.load_report import RETRY_DRAINING_S, LoadPacer, load_of
from services.scheduler.membership import GreetingRefusedError, Peer
from services.scheduler.router import Router
from services.scheduler.routing import routing_of
from services.scheduler.step_result import ResultError
from services.scheduler.workers import Workers
from services.wire.answers import DecodeFailed, StopFound
from services.wire.controls import Control
from services.wire.errors import EndpointInUseError
from services.wire.finish import Finish
from services.wire.members import ForeignHello, Goodbye, Heartbeat, Hello, Role, State
from services.wire.requests import Abort, Acknowledge, Resend, Submit
from services.wire.steps import GrammarCompiled, StepResult
from services.wire.transport import BlockingReceiver, Envelope, RouterPort

FAREWELL_S = 2.0  # the longest wait for acknowledgements before leaving: a socket that closes takes unread frames along
_LOOK_INTERVAL_S = 0.25  # how often silence is looked for, whose limits are seconds
_EARLY_S = 0.05  # what is due so soon is done in a turn that comes anyway: waking up for it alone would cost more
_SETTLED_S = 1.0  # idle for so long: time to count all pages

_OF_PLAIN_TURNS = (StepResult, Heartbeat, Acknowledge)  # unless there is more to them than usual

_Call: TypeAlias = tuple[tuple[Role, ...], Callable[[Peer, Any, float], object]]
_NOBODYS: _Call = ((), lambda peer, message, now_s: None)

logger = logging.getLogger(__name__)


class BackendLostError(GroupLostError):
    """A process that no request can do without is gone: the group ends, its supervisor starts it again."""


class SchedulerService:
    """The loop, its socket and its timers."""

    def __init__(self, process: Process) -> None:
        """Binds the scheduler's endpoint.

        Raises:
            EndpointInUseError, StartError: it cannot.
        """
        now_s = time.monotonic()
        self._process = process
        endpoint = process.scheduler_endpoint()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._port = RouterPort(self._context, endpoint)
        except EndpointInUseError:
            self._context.term()
            raise
        self._receiver = BlockingReceiver([self._port])
        process.on_stop = self._receiver.interrupt
        self._router = Router(routing_of(process.settings.routing))
        self._group = Group(process.identity, self._port, process.vital_signs, now_s)
        self._workers = Workers(self._router, self._port, process.settings, process.identity.epoch)
        self._answers = Answers(self._router, self._port, Journeys(process.identity, self._router, self._port))
        self._collector = SchedulerCollector(self._workers, self._answers, self._port, self._group.membership)
        process.registry.register(self._collector)
        self._controls = Controls(self._router, self._workers, self._answers)
        self._calls = self._calls_of_members()
        self._pacer = LoadPacer()
        self._fatal = ""  # why the process must end, once clients have been told
        self._drain_deadline_s: float | None = None
        self._leave_by_s: float | None = None
        self._timer_s = now_s  # the first of the timers
        self._looked_s = now_s  # when silence was last looked for
        self._is_plain = False  # whether this turn is about nothing but answers that go on
        self._planned: list[Peer] = []  # the workers that get plans; nothing in a plain turn changes them
        self._busy_s = now_s
        self._is_counted = False  # whether the pages were counted since the last work

    @property
    def address(self) -> str:
        """Where it is bound."""
        return self._port.address

    def serve(self) -> None:
        """Serves until told to stop and drained.

        Raises:
            BackendLostError: the last worker or detokenizer is lost. Every open request was ended before.
            LedgerError, QueueError: pages or requests do not add up: a fault of the scheduler.
        """
        linger_ms = 0
        try:
            while not self._is_done(time.monotonic()):
                if not self._is_plain:
                    self._timer_s = self._next_timer_s()
                batch = self._receiver.receive_batch(max(0.0, self._timer_s - time.monotonic()))
                self._turn([envelope for _, envelope in batch], time.monotonic())
            linger_ms = int(1000 * FAREWELL_S)
        finally:
            self._port.close(linger_ms)
            self._context.term()
        if self._fatal:
            raise BackendLostError(self._fatal)

    # ------------------------------------------------------------ one turn

    def _turn(self, batch: list[Envelope], now_s: float) -> None:
        """Most turns of a busy scheduler are plain: one token for each came, and the next plan goes out."""
        self._is_plain = bool(batch) and now_s < min(self._timer_s - _EARLY_S, self._looked_s + _LOOK_INTERVAL_S)
        for envelope in batch:
            self._take(envelope, now_s)
        self._group.progress += bool(batch)
        if not self._is_plain:
            self._answers.end_overdue(now_s)
            self._remove_silent(now_s)
            self._answers.tell_prompts()
            self._planned = self._ready(Role.GPU_WORKER, can_drain=True)
        unreachable = self._workers.plan(self._planned, now_s)
        if unreachable:
            self._remove_unreachable(unreachable, now_s)
        self._is_plain &= not self._answers.journeys.planned(now_s)
        self._answers.flush()
        if self._answers.unreachable:
            self._remove_unreachable(self._unreachable_peers(), now_s)
        if not self._is_plain:
            self._tell_changes(now_s)

    def _tell_changes(self, now_s: float) -> None:
        """What every turn does that is not plain."""
        self._group.tell_roster()
        self._group.tell_times(now_s + _EARLY_S)
        self._router.expire(now_s)
        self._tell_load(now_s)
        self._count_pages_when_idle(now_s)

    def _next_timer_s(self) -> float:
        is_busy = bool(self._router.num_open)
        timers = [self._group.next_s(), self._pacer.next_s(), self._answers.next_deadline_s]
        if not is_busy and not self._is_counted:
            timers.append(self._busy_s + _SETTLED_S)
        leave_s = self._drain_deadline_s if self._leave_by_s is None else self._leave_by_s
        return min(timers) if leave_s is None else min(*timers, leave_s)

    def _take(self, envelope: Envelope, now_s: float) -> None:
        message = envelope.message
        self._is_plain &= isinstance(message, _OF_PLAIN_TURNS)
        if isinstance(message, Hello):
            self._greet(envelope.peer, message, now_s)
            return
        if isinstance(message, ForeignHello):
            self._group.refuse(envelope.peer, f"the scheduler does not speak protocol {message.version}")
            return
        peer = self._group.membership.peers.get(envelope.peer)
        if peer is None:
            self._group.answer_stranger(envelope.peer)
            return
        peer.heard_s = now_s
        roles, call = self._calls.get(type(message), _NOBODYS)
        if peer.role in roles:
            call(peer, message, now_s)
        else:
            self._collector.num_unexpected += 1
            logger.warning("dropped a %s from %s", type(message).__name__, peer.name)

    def _calls_of_members(self) -> dict[type, _Call]:
        """By message: which roles may send it, and what is done then."""
        answers = self._answers
        tokenizer, detokenizer, worker = (Role.TOKENIZER,), (Role.DETOKENIZER,), (Role.GPU_WORKER,)
        return {
            Heartbeat: (tuple(Role), lambda peer, message, now_s: self._hear(peer, message)),
            Goodbye: (tuple(Role), lambda peer, message, now_s: self._remove(peer, False, now_s)),
            Submit: (tokenizer, self._submit),
            Abort: (tokenizer, lambda peer, message, now_s: answers.abort(message, now_s)),
            Acknowledge: (tokenizer, lambda peer, message, now_s: answers.acknowledge(message)),
            Control: (tokenizer, self._control),
            Resend: (tokenizer + detokenizer, self._resend),
            StopFound: (detokenizer, lambda peer, message, now_s: answers.stop_found(message, now_s)),
            DecodeFailed: (detokenizer, lambda peer, message, now_s: answers.decode_failed(message, now_s)),
            StepResult: (worker, self._take_result),
            GrammarCompiled: (
                worker,
                lambda peer, message, now_s: answers.grammar_compiled(peer.routing_id, message, now_s),
            ),
        }

    def _control(self, peer: Peer, control: Control, now_s: float) -> None:
        self._port.send(peer.routing_id, self._controls.perform(control, now_s))

    def _resend(self, peer: Peer, resend: Resend, now_s: float) -> None:
        self._answers.resend(resend, from_tokenizer=peer.role is Role.TOKENIZER)

    def _submit(self, peer: Peer, submit: Submit, now_s: float) -> None:
        if self._group.state is State.DRAINING:
            refusal = RequestRefusedError(503, "draining", "The server is shutting down.")
            self._answers.refuse(peer.routing_id, submit, refusal, RETRY_DRAINING_S)
            return
        workers = self._takers()
        detokenizers = [detokenizer.routing_id for detokenizer in self._ready(Role.DETOKENIZER)]
        self._answers.submit(peer.routing_id, submit, (workers, detokenizers), now_s)

    def _take_result(self, peer: Peer, result: StepResult, now_s: float) -> None:
        try:
            outcome = self._workers.take_result(peer, result, now_s)
            self._answers.take(outcome, now_s)
            self._is_plain &= not (outcome.rows or result.prompt_logprobs or result.embeddings)
        except ResultError as error:
            self._is_plain = False
            self._lose(peer, str(error), now_s)

    # ------------------------------------------------------------ who is there

    def _greet(self, routing_id: bytes, hello: Hello, now_s: float) -> None:
        try:
            replaced = self._group.greet(routing_id, hello, now_s)
            if replaced is not None:
                self._remove(replaced, True, now_s)
            self._workers.join(self._group.membership.peers[routing_id], now_s)
        except GreetingRefusedError as refusal:
            self._group.refuse(routing_id, str(refusal))
            peer = self._group.membership.peers.get(routing_id)
            if peer is not None:
                self._remove(peer, True, now_s)

    def _hear(self, peer: Peer, heartbeat: Heartbeat) -> None:
        """Takes a heartbeat. What a worker that begins to drain has not begun goes to others."""
        was_draining = peer.state is State.DRAINING
        self._is_plain &= peer.state is heartbeat.state
        self._group.membership.hear(peer, heartbeat)
        if peer.role is Role.GPU_WORKER and peer.state is State.DRAINING and not was_draining:
            self._router.move_waiting(peer.routing_id, self._takers())

    def _takers(self) -> list[bytes]:
        """The workers that take new requests."""
        return [worker.routing_id for worker in self._ready(Role.GPU_WORKER)]

    def _ready(self, role: Role, can_drain: bool = False) -> list[Peer]:
        """Members of a role that work; with `can_drain` also those that only finish what they have."""
        states = (State.READY, State.DRAINING) if can_drain else (State.READY,)
        return [
            peer
            for peer in self._group.membership.of(role)
            if peer.state in states and (role is not Role.GPU_WORKER or peer.routing_id in self._router.cores)
        ]

    def _remove_silent(self, now_s: float) -> None:
        if now_s < self._looked_s + _LOOK_INTERVAL_S:
            return
        self._looked_s = now_s
        membership = self._group.membership
        for peer in self._workers.stalled(membership.of(Role.GPU_WORKER), now_s):
            self._lose(peer, "no step has ended for too long", now_s)
        for peer in membership.silent(now_s):
            self._lose(peer, f"silent for {now_s - peer.heard_s:.1f} s", now_s)

    def _unreachable_peers(self) -> list[Peer]:
        unreachable, self._answers.unreachable = self._answers.unreachable, set()
        peers = self._group.membership.peers
        return [peers[routing_id] for routing_id in unreachable if routing_id in peers]

    def _remove_unreachable(self, peers: list[Peer], now_s: float) -> None:
        """Removing one can show another to be unreachable; each removal shortens the list of members."""
        while peers:
            for peer in peers:
                self._lose(peer, "it cannot be reached", now_s)
            self._answers.flush()
            peers = self._unreachable_peers()

    def _lose(self, peer: Peer, reason: str, now_s: float) -> None:
        """A member is lost. Where no other of its role can take over, the group ends."""
        if peer.routing_id not in self._group.membership.peers:
            return
        logger.error("%s is lost: %s", peer.name, reason)
        self._remove(peer, True, now_s)
        if peer.role is not Role.TOKENIZER and not self._group.membership.of(peer.role):
            self._fatal = f"{peer.name} is lost ({reason}), and there is no other"

    def _remove(self, peer: Peer, is_lost: bool, now_s: float) -> None:
        """A member is gone: ends what cannot go on without it."""
        if peer.routing_id not in self._group.membership.peers:
            return
        self._is_plain = False
        self._group.remove(peer, is_lost)
        if peer.role is Role.TOKENIZER:
            self._answers.tokenizer_lost(peer.routing_id, now_s)
        elif peer.role is Role.DETOKENIZER:
            self._answers.detokenizer_lost(peer.routing_id, now_s)
        else:
            self._answers.produced(self._workers.leave(peer, self._takers()), now_s)

    # ------------------------------------------------------------ times

    def _tell_load(self, now_s: float) -> None:
        if not self._pacer.may_be_due(now_s):
            return
        cores = list(self._router.cores.values())
        state = self._group.state
        if state is State.READY and not (self._ready(Role.GPU_WORKER) and self._ready(Role.DETOKENIZER)):
            state = State.STARTING
        last_s = self._answers.last_token_s
        idle_ms = 0 if last_s is None else max(1, int(1000 * (now_s - last_s)))
        num_waiting = sum(core.num_waiting for core in cores)
        load = load_of(cores, state, self._answers.rate.retry_after_s(num_waiting, now_s), idle_ms)
        if self._pacer.is_due(load, now_s):
            for peer in self._group.membership.of(Role.TOKENIZER):
                self._port.send_now(peer.routing_id, load)

    def _count_pages_when_idle(self, now_s: float) -> None:
        if self._router.num_open:
            self._busy_s, self._is_counted = now_s, False
        elif not self._is_counted and now_s - self._busy_s >= _SETTLED_S:
            for core in self._router.cores.values():
                core.check_invariants()
            self._is_counted = True

    # ------------------------------------------------------------ the end

    def _is_done(self, now_s: float) -> bool:
        """Whether to leave: told to stop or bound to fail, all answers ended, and their ends acknowledged."""
        if self._process.is_stopping:
            self._is_plain = False
        if self._process.is_stopping and self._drain_deadline_s is None:
            self._drain_deadline_s = now_s + self._process.drain_timeout_s
            self._group.drain(now_s)
            self._workers.is_paused = False  # what is open shall end by itself if it can
            logger.info("draining: %d requests are open", self._router.num_open)
            self._tell_load(now_s)
        is_late = self._drain_deadline_s is not None and now_s >= self._drain_deadline_s
        if self._fatal or is_late:
            self._end_all(now_s)
        elif self._drain_deadline_s is None:
            return False
        if self._router.num_open:
            return False
        if self._leave_by_s is None:
            self._leave_by_s = now_s + FAREWELL_S
        return now_s >= self._leave_by_s or not self._router.is_awaited(self._group.membership.peers)

    def _end_all(self, now_s: float) -> None:
        """Ends what is open with an error; the tokens of this turn go out first."""
        open_records = self._router.open_records()
        if open_records:
            logger.warning("%d requests end here", len(open_records))
        for record in open_records:
            self._answers.end(record, Finish.BACKEND_LOST, now_s)
        self._answers.flush()


def main(process: Process) -> None:
    """Binds, then serves until stopped."""
    service = SchedulerService(process)
    logger.info("listening on %s", service.address)
    gc.collect()
    gc.freeze()
    service.serve()
