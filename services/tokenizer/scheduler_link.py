"""Tokenizer process: its sockets, one to the scheduler and one that detokenizers connect to, and the loop over both.

The one task that feeds the stream table. Each turn takes what came, then does what is due: heartbeats (from this loop
itself, so that a stuck loop goes silent), acknowledgements, requests for lost chunks, keep-alive comments, and the
check that the processes behind are still there: when they are not, every open request ends with an error at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import zmq

from services.runtime.service import Process
from services.tokenizer.api_error import ApiError, Code, internal_error, unavailable
from services.tokenizer.backend_view import BackendView
from services.tokenizer.control_calls import ControlCalls
from services.tokenizer.open_request import AnswerSink, OpenRequest
from services.tokenizer.stream_table import StreamTable
from services.wire.answers import HopReport, TextChunks
from services.wire.controls import ControlDone
from services.wire.endpoints import parse_routing_id
from services.wire.errors import ProtocolError
from services.wire.members import Role, State, Telemetry
from services.wire.requests import Admitted, Load, Refused, Submit
from services.wire.steps import Embedding, PromptLogprobs
from services.wire.transport import AsyncReceiver, DealerPort, Envelope, Port, RouterPort

ACKNOWLEDGE_AFTER_S = 0.2  # an answer that has ended: its record can go
ACKNOWLEDGE_OPEN_AFTER_S = 1.0  # answers that go on: the scheduler keeps their records anyway
_TICK_S = 1.0
_LAG_PROBE_S = 0.1
_FAREWELL_MS = 500  # how long closing sockets may take to hand over their last frames

logger = logging.getLogger(__name__)


class SchedulerLink:
    """Sends requests to the scheduler and brings their text back."""

    def __init__(self, process: Process) -> None:
        """Binds and connects, inside a running event loop; nothing is sent before `run`."""
        self._process = process
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = RouterPort(self._context, process.peer_endpoint())
        self._scheduler = DealerPort(self._context, process.scheduler_endpoint(), process.identity.routing_id)
        self._receiver = AsyncReceiver()
        for port in self.ports.values():
            self._receiver.add(port)
        self._session = process.new_session(self._inbox.address)
        self._scheduler_epoch: int | None = None
        self._is_scheduler_lost = False
        self._acknowledge_s = float("inf")
        self._tick_s = 0.0
        self.table = StreamTable()
        self.view = BackendView(self._session)
        self.control = ControlCalls(self._scheduler.send)
        self.ended: ApiError | None = None
        """What every request is told from now on; None as long as they are answered."""
        self.on_report: Callable[[HopReport], object] = lambda report: None
        """Called with what other processes tell of requests."""
        self.loop_lag_s = 0.0
        """How late a timer of this loop was last called."""

    @property
    def ports(self) -> dict[str, Port]:
        """The sockets by what they lead to, for metrics."""
        return {"scheduler": self._scheduler, "detokenizers": self._inbox}

    def set_state(self, state: State) -> None:
        """Tells the scheduler what this process can be asked to do."""
        self._session.set_state(state, time.monotonic())
        self._receiver.interrupt()

    def submit(self, submits: Sequence[Submit], sink: AnswerSink, received_s: float) -> OpenRequest:
        """Journals a request and asks for its answers; the caller closes it, whatever happens.

        Args:
            submits: One for each answer.
            sink: Where their text goes.
            received_s: When the client's request came, by `time.monotonic`.
        """
        request = self.table.open(submits, sink, received_s)
        if self.ended is not None:
            request.refuse(self.ended)
            return request
        try:
            if not all(self._scheduler.send(submit) for submit in submits):
                request.refuse(unavailable(Code.OVERLOADED, "the scheduler does not keep up"))
        except ProtocolError:  # no receiver would take it, which the checks before should have seen
            error = internal_error()
            logger.exception("a Submit of %d prompt tokens: %s", request.entries[0].num_prompt_tokens, error.message)
            request.fail(error)
        return request

    def close_request(self, request: OpenRequest) -> None:
        """Forgets a request; what has not ended of it is aborted at once."""
        abort = self.table.close(request)
        if abort is not None:
            self._scheduler.send(abort)

    def end_requests(self, error: ApiError) -> None:
        """Ends every open request, and those that are still being received or encoded as soon as they are."""
        self.ended = error
        self.table.fail_all(error)

    def close(self, has_drained: bool) -> None:
        """Says goodbye if all went well and closes the sockets; blocks a moment until the last frames are out."""
        if has_drained:
            self._scheduler.send(self._session.goodbye())
        for port in self.ports.values():
            self._receiver.remove(port)
            port.close(_FAREWELL_MS if has_drained else 0)
        self._context.term()

    async def run(self) -> None:
        """The loop; ends only by cancellation or a fault.

        Raises:
            HandshakeError: this process may not join the group.
            OrphanError: the parent is gone.
        """
        while True:
            for port, envelope in await self._receiver.receive_batch(self._wait_s(time.monotonic())):
                self._take(port, envelope)
            self._do_what_is_due(time.monotonic())

    def _wait_s(self, now_s: float) -> float:
        return max(0.0, min(now_s + self._session.next_due_s(now_s), self._acknowledge_s, self._tick_s) - now_s)

    def _take(self, port: Port, envelope: Envelope) -> None:
        item = envelope.message
        if isinstance(item, TextChunks):
            self._take_chunks(port, envelope.peer, item)
        elif isinstance(item, HopReport):
            self._take_report(port, envelope.peer, item)
        elif port is self._scheduler:
            self._take_from_scheduler(item)
        else:
            self._refuse(item, envelope.peer)

    def _take_chunks(self, port: Port, peer: bytes, chunks: TextChunks) -> None:
        """From a detokenizer, or from the scheduler itself, which ends the answers of a detokenizer that is lost."""
        sender = parse_routing_id(peer)
        if port is self._inbox and (sender is None or sender.role is not Role.DETOKENIZER):
            self._refuse(chunks, peer)
            return
        now_s = time.monotonic()
        self.table.take(chunks, now_s)
        self._acknowledge_soon(now_s)

    def _acknowledge_soon(self, now_s: float) -> None:
        if self.table.owes_acknowledgement:
            after_s = ACKNOWLEDGE_AFTER_S if self.table.has_new_end else ACKNOWLEDGE_OPEN_AFTER_S
            self._acknowledge_s = min(self._acknowledge_s, now_s + after_s)

    def _take_report(self, port: Port, peer: bytes, report: HopReport) -> None:
        """From the scheduler, or from a detokenizer about itself."""
        sender = parse_routing_id(peer)
        if port is self._inbox and (sender is None or (sender.role, report.role) != (Role.DETOKENIZER,) * 2):
            self._refuse(report, peer)
        else:
            self.on_report(report)

    def _take_from_scheduler(self, item: object) -> None:
        now_s = time.monotonic()
        if self._session.receive(item, now_s):
            self._is_scheduler_lost = False
            self._watch_epoch()
            self._watch_roster()
            return
        match item:
            case Admitted():
                self.table.admit(item)
            case Refused():
                self.table.refuse(item)
            case Load():
                self.view.take_load(item, now_s)
            case Telemetry():
                self.view.take_telemetry(item, now_s)
            case PromptLogprobs() | Embedding():
                self.table.take_piece(item, now_s)
                self._acknowledge_soon(now_s)
            case ControlDone():
                self.control.take(item)
            case _:
                self._refuse(item, b"scheduler")

    def _refuse(self, item: object, peer: bytes) -> None:
        counters = self.table.counters
        counters.refused_messages += 1
        if counters.refused_messages.bit_count() == 1:  # the 1st, 2nd, 4th, ...: a flood does not fill the log
            logger.warning("dropped a %s from %r (%d so far)", type(item).__name__, peer, counters.refused_messages)

    def _do_what_is_due(self, now_s: float) -> None:
        if now_s >= self._acknowledge_s:
            self._acknowledge_s = float("inf")
            self._send_if_any(self.table.take_acknowledgement())
        if self.table.has_gaps:
            self._send_if_any(self.table.take_resend(now_s))
        if self._session.next_due_s(now_s) == 0:
            self._beat(now_s)
        if now_s >= self._tick_s:
            self._tick_s = now_s + _TICK_S
            for request in self.table.requests:
                request.sink.keep_alive(now_s)
            self._process.end_with_parent()
        if self._session.is_silent(now_s) and not self._is_scheduler_lost:
            self._is_scheduler_lost = True
            self._lose("the scheduler process does not answer")

    def _beat(self, now_s: float) -> None:
        self._session.progress = self.table.counters.generation_tokens
        for item in self._session.messages_due(now_s):
            self._scheduler.send_now(item)
        loop = asyncio.get_running_loop()
        loop.call_later(_LAG_PROBE_S, self._measure_lag, time.monotonic() + _LAG_PROBE_S)

    def _measure_lag(self, due_s: float) -> None:
        self.loop_lag_s = max(0.0, time.monotonic() - due_s)

    def _send_if_any(self, item: object | None) -> None:
        if item is not None:
            self._scheduler.send(item)

    def _watch_epoch(self) -> None:
        """A scheduler that was started anew knows none of the open requests."""
        epoch = self._session.scheduler_epoch
        if self._scheduler_epoch not in (None, epoch):
            self._lose("the scheduler process was started anew")
        self._scheduler_epoch = epoch

    def _watch_roster(self) -> None:
        """A request whose worker or detokenizers are all gone would never end by itself."""
        missing = self.view.missing_roles()
        if missing and self.table.requests:
            self._fail_all(f"the {missing[0]} process has died")

    def _lose(self, problem: str) -> None:
        self.view.forget()
        self.control.fail_all(_lost(problem))
        self._fail_all(problem)

    def _fail_all(self, problem: str) -> None:
        logger.error("%s: ending %d requests", problem, len(self.table.requests))
        self.table.fail_all(_lost(problem))


def _lost(problem: str) -> ApiError:
    return unavailable(Code.BACKEND_LOST, f"{problem}; try again")
