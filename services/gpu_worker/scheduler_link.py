"""gpu_worker: the socket to the scheduler, and the session on it.

Owns both. It takes what concerns the session itself, hands plans up and results down, and says that this process lives;
it never looks into a plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from services.runtime.service import GroupLostError, Process
from services.runtime.session import SILENCE_LIMIT_S
from services.wire.members import State, WorkerCard
from services.wire.steps import CompileGrammar, GrammarCompiled, StepPlan, StepResult
from services.wire.transport import BlockingReceiver, DealerPort

_PUMP_INTERVAL_S = 0.05
_FAREWELL_MS = 1000  # how long the last frames may take to be handed over

logger = logging.getLogger(__name__)


class SchedulerLostError(GroupLostError):
    """The scheduler is silent or takes nothing: this process ends, its supervisor decides what comes next."""


class StopRequestedError(Exception):
    """This process was told to stop before it was ready."""


class SchedulerLink:
    """What this process says to the scheduler and hears from it."""

    def __init__(self, process: Process) -> None:
        """Connects; the scheduler need not be there yet.

        Raises:
            StartError: where it would be is not set.
        """
        endpoint = process.scheduler_endpoint()
        self._process = process
        self.session = process.new_session(address="")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.port = DealerPort(self._context, endpoint, process.identity.routing_id)
        self._receiver = BlockingReceiver([self.port])
        process.on_stop = self.interrupt
        self._pumped_s = 0.0
        self.num_refused = 0
        """Messages that nobody could use."""
        self.on_grammar: Callable[[CompileGrammar], None] | None = None
        """Takes grammars to compile, from when this process is ready; it must not wait."""

    def interrupt(self) -> None:
        """Ends a waiting `receive`. Safe in a signal handler and in another thread."""
        self._receiver.interrupt()

    def pump(self) -> None:
        """For the time before this process is ready: call it often; it says that the process lives.

        Raises:
            StopRequestedError: it was told to stop.
            SchedulerLostError, HandshakeError: see `receive`.
        """
        if self._process.is_stopping:
            raise StopRequestedError
        now_s = time.monotonic()
        if now_s - self._pumped_s >= _PUMP_INTERVAL_S:
            self._pumped_s = now_s
            for plan in self.receive(0.0):
                self.refuse(f"step {plan.step} before this worker is ready")

    def introduce(self, card: WorkerCard) -> None:
        """The model is loaded: greets once more, now with what this worker brings."""
        self.session.worker_card = card
        self.session.set_state(State.READY, time.monotonic())

    def receive(self, timeout_s: float) -> list[StepPlan]:
        """The plans that have come, after waiting at most `timeout_s` for anything; sends what is due.

        Raises:
            SchedulerLostError: the scheduler has been silent for too long.
            HandshakeError: it does not let this process join.
        """
        self._send_due()
        wait_s = min(timeout_s, self.session.next_due_s(time.monotonic()))
        plans = []
        for _, envelope in self._receiver.receive_batch(wait_s):
            message = envelope.message
            if self.session.receive(message, time.monotonic()):
                continue
            if isinstance(message, StepPlan):
                plans.append(message)
            elif isinstance(message, CompileGrammar) and self.on_grammar is not None:
                self.on_grammar(message)
            else:
                self.refuse(f"a {type(message).__name__}")
        now_s = time.monotonic()
        if self.session.is_silent(now_s):
            raise SchedulerLostError(f"the scheduler has said nothing for {SILENCE_LIMIT_S:.0f} s")
        self._send_due()
        return plans

    def send(self, result: StepResult | GrammarCompiled) -> None:
        """Sends a result, now or as soon as the scheduler takes it.

        Raises:
            SchedulerLostError: it takes nothing any more.
        """
        if not self.port.send(result):
            raise SchedulerLostError("the scheduler takes no results")

    def refuse(self, what: str) -> None:
        """Counts and logs what was dropped."""
        self.num_refused += 1
        logger.warning("dropped %s from the scheduler", what)

    @property
    def is_alone(self) -> bool:
        """Whether the scheduler is gone: nothing will come from it, and its last words may be lost with it.

        One that is there has room for what waits for it, which is never more than a few results.
        """
        return not zmq.zmq_poll([(self.port.socket, zmq.POLLOUT)], 0)

    def close(self, is_friendly: bool) -> None:
        """Closes the socket; a friendly end says goodbye first."""
        if is_friendly and self.session.is_welcome:
            self.port.send(self.session.goodbye())
        self.port.close(_FAREWELL_MS if is_friendly else 0)
        self._context.term()

    def _send_due(self) -> None:
        for message in self.session.messages_due(time.monotonic()):
            self.port.send_now(message)
