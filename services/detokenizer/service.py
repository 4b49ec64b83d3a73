"""Detokenizer process: the shell around `Decoders`.

One blocking poll loop. It owns a socket to the scheduler and one to each tokenizer process in the roster. A turn takes
what arrived, advances the decoders and sends what came of it: one message to each tokenizer, no timer.

It must never decide anything about text, and must never import torch or a tokenizer library.
"""

from __future__ import annotations

import gc
import logging
import time

import zmq

from services.detokenizer.decoders import Decoders
from services.detokenizer.incremental import TokenPieces
from services.detokenizer.instruments import DetokenizerCollector
from services.detokenizer.turn_times import EndedAnswer
from services.model_files.errors import ModelFileError
from services.model_files.source import open_model
from services.model_files.vocabulary import load_vocabulary
from services.runtime.service import GroupLostError, Process, StartError
from services.runtime.session import SILENCE_LIMIT_S
from services.wire.answers import DecodeOpen, HopReport, TokensProduced
from services.wire.endpoints import Identity
from services.wire.errors import ProtocolError
from services.wire.finish import Finish
from services.wire.members import Role, Roster, State, Welcome
from services.wire.transport import BlockingReceiver, DealerPort, Port

_ROSTER_WAIT_S = 0.4  # how long a draining process without answers waits for the scheduler to have noticed
_FAREWELL_MS = 2000  # how long closing sockets may take to hand over their last frames
_log = logging.getLogger(__name__)


class SchedulerLostError(GroupLostError):
    """The scheduler is silent or takes nothing: this process ends, and its supervisor starts it again."""


class DetokenizerService:
    """The loop and its sockets."""

    def __init__(self, process: Process, decoders: Decoders) -> None:
        """Connects to the scheduler."""
        self._process = process
        self._decoders = decoders
        self._session = process.new_session(address="")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._receiver = BlockingReceiver([])
        self._scheduler = self._connect(process.scheduler_endpoint())
        self._tokenizers: dict[bytes, DealerPort] = {}
        self._served_epoch: int | None = None
        self._drain_began_s: float | None = None
        process.registry.register(DetokenizerCollector(decoders, self._ports_of_roles))
        process.on_stop = self._receiver.interrupt

    def run(self) -> None:
        """Serves until the process was told to stop and nothing is open any more.

        Raises:
            SchedulerLostError: the scheduler has said nothing for SILENCE_LIMIT_S, or takes no more messages.
            HandshakeError: the scheduler does not let this process join.
        """
        linger_ms = 0
        try:
            self._session.set_state(State.READY, time.monotonic())
            while not self._is_done(time.monotonic()):
                self._greet(time.monotonic())
                batch = self._receiver.receive_batch(self._session.next_due_s(time.monotonic()))
                turn_began_s = time.monotonic()
                for port, envelope in batch:
                    self._take(port, envelope.message)
                self._send_outgoing(turn_began_s)
                self._check_scheduler(time.monotonic())
            self._send_to_scheduler(self._session.goodbye())
            linger_ms = _FAREWELL_MS
        finally:
            self._close(linger_ms)

    def _is_done(self, now_s: float) -> bool:
        """Whether to leave: told to stop, and drained or out of time."""
        if not self._process.is_stopping:
            return False
        if self._drain_began_s is None:
            self._drain_began_s = now_s
            self._session.set_state(State.DRAINING, now_s)
            _log.info("draining: %d answers are open", self._decoders.num_open)
        draining_s = now_s - self._drain_began_s
        if not self._session.is_welcome or self._is_drained(draining_s):
            return True
        if draining_s < self._process.drain_timeout_s:
            return False
        if self._decoders.num_open:
            _log.warning("drain time is over: %d answers end here", self._decoders.num_open)
        self._decoders.end_all(Finish.BACKEND_LOST)
        self._send_outgoing(now_s)
        return True

    def _is_drained(self, draining_s: float) -> bool:
        """Nothing open, nothing unsent, and no new answer under way: the roster shows that the scheduler knows.

        A scheduler that is ending as well sends no more rosters, so the wait for one is short.
        """
        own_epoch = self._process.identity.epoch
        members = self._session.members_of(Role.DETOKENIZER)
        gets_answers = any(member.epoch == own_epoch and member.state != State.DRAINING for member in members)
        has_unsent = any(port.has_outbox for port in self._ports())
        return not (self._decoders.num_open or has_unsent or (gets_answers and draining_s < _ROSTER_WAIT_S))

    def _greet(self, now_s: float) -> None:
        for message in self._session.messages_due(now_s):
            self._scheduler.send_now(message)

    def _take(self, port: Port, message: object) -> None:
        if port is not self._scheduler:
            self._refuse(message, "a tokenizer")
        elif self._session.receive(message, time.monotonic()):
            if isinstance(message, Roster):
                self._follow_roster()
            elif isinstance(message, Welcome):
                self._follow_scheduler(message.epoch)
        elif isinstance(message, TokensProduced):
            try:
                self._decoders.advance(message)
                self._session.progress += 1
            except ProtocolError as error:
                self._refuse(message, f"the scheduler: {error}")
        elif isinstance(message, DecodeOpen):
            self._decoders.open(message, time.time())
        else:
            self._refuse(message, "the scheduler")

    def _refuse(self, message: object, sender: str) -> None:
        self._decoders.statistics.num_refused_messages += 1
        _log.warning("dropped a %s from %s", type(message).__name__, sender)

    def _follow_scheduler(self, epoch: int) -> None:
        """A scheduler started anew knows none of our answers; their tokenizers end them or submit them again."""
        if self._served_epoch not in (None, epoch):
            _log.warning("another scheduler: %d answers of the last one are forgotten", self._decoders.num_open)
            self._decoders.forget_all()
        self._served_epoch = epoch

    def _follow_roster(self) -> None:
        """Connects to new tokenizer processes, drops those that are gone with their answers."""
        addresses = {
            Identity(member.role, member.instance, member.epoch).routing_id: member.address
            for member in self._session.members_of(Role.TOKENIZER)
        }
        gone = self._tokenizers.keys() - addresses.keys()
        for tokenizer in gone:
            self._disconnect(tokenizer)
        self._decoders.drop_tokenizers(gone)
        for tokenizer in addresses.keys() - self._tokenizers.keys():
            self._tokenizers[tokenizer] = self._connect(addresses[tokenizer])

    def _send_outgoing(self, turn_began_s: float) -> None:
        outgoing = self._decoders.take_outgoing()
        lost: set[bytes] = set()
        for tokenizer, chunks in outgoing.for_tokenizers():
            port = self._tokenizers.get(tokenizer)
            if port is None or not port.send(chunks):
                lost.add(tokenizer)
        for message in outgoing.for_scheduler():
            self._send_to_scheduler(message)
        num_rows = outgoing.num_rows
        if num_rows:
            self._decoders.times.add(time.monotonic() - turn_began_s, num_rows)
        for ended in outgoing.ended:
            self._report(ended)
        if lost:
            self._lose(lost)

    def _report(self, ended: EndedAnswer) -> None:
        """Tells how an answer fared here, behind its last chunk; missed only where the outbox has no room."""
        work_s, wait_s = self._decoders.times.since(ended.sums_at_start)
        report = HopReport(
            request_id=ended.request_id,
            attempt=ended.attempt,
            role=Role.DETOKENIZER,
            instance=self._process.identity.instance,
            started_unix_us=int(1e6 * ended.started_unix_s),
            wait_us=int(1e6 * wait_s),
            work_us=int(1e6 * work_s),
            counters={"chunks": ended.num_chunks, "tokens": ended.num_tokens},
        )
        port = self._tokenizers.get(ended.tokenizer)
        if port is not None:
            port.send(report)

    def _lose(self, tokenizers: set[bytes]) -> None:
        """A tokenizer that is not in the roster or reads nothing: its answers have no reader; the scheduler is told."""
        _log.error("chunks for %s could not be sent: their answers end", sorted(tokenizers))
        self._decoders.drop_tokenizers(tokenizers)
        for message in self._decoders.take_outgoing().for_scheduler():
            self._send_to_scheduler(message)

    def _send_to_scheduler(self, message: object) -> None:
        if not self._scheduler.send(message):
            raise SchedulerLostError("the scheduler takes no messages")

    def _check_scheduler(self, now_s: float) -> None:
        if self._session.is_silent(now_s):
            raise SchedulerLostError(f"the scheduler has been silent for {SILENCE_LIMIT_S} s")

    def _ports_of_roles(self) -> dict[Role, list[Port]]:
        return {Role.SCHEDULER: [self._scheduler], Role.TOKENIZER: list(self._tokenizers.values())}

    def _ports(self) -> list[Port]:
        return [self._scheduler, *self._tokenizers.values()]

    def _connect(self, endpoint: str) -> DealerPort:
        port = DealerPort(self._context, endpoint, self._process.identity.routing_id)
        self._receiver.add(port)
        return port

    def _disconnect(self, tokenizer: bytes) -> None:
        port = self._tokenizers.pop(tokenizer)
        self._decoders.statistics.num_refused_messages += port.stats.rejected  # its own count ends with it
        self._receiver.remove(port)
        port.close()

    def _close(self, linger_ms: int) -> None:
        """Closes all sockets; blocks until their last frames are handed over, at most `linger_ms`."""
        for port in self._ports():
            self._receiver.remove(port)
            port.close(linger_ms)
        self._context.term()


def main(process: Process) -> None:
    """Loads the vocabulary, then serves; the scheduler hears of this process only when it can work."""
    try:
        pieces = TokenPieces(load_vocabulary(open_model(process.settings.model)))
    except ModelFileError as error:
        raise StartError(str(error)) from error
    gc.collect()
    gc.freeze()  # the tables live as long as the process: no collection need look at them again
    DetokenizerService(process, Decoders(pieces)).run()
