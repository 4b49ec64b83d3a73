"""The supervisor: the only parent of a host's processes. One child that dies ends them all.

One that was told to end, and did as it should, may go while another of its kind remains.

It owns the children from start to end and must never hold model code or request state. It is one loop over three kinds
of event: a signal (a child's death is one: SIGCHLD), a line that a child printed, a deadline. Nothing else wakes it, so
an idle server costs nothing here.

    starting --ready--> serving --SIGTERM--> draining: tokenizers first, then the others --> status 0
        |                  |------SIGINT---> the same, in haste -----------------------> status 130
        '---child died-----'------child died, in haste ------------------------------> status 1, or 2 when the
                                                                                        child could not start
After a death the last line on standard error tells why, whatever the others said while they ended.
"""

from __future__ import annotations

import selectors
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from services.launcher.child import Child, ChildSpec
from services.launcher.signals import SignalReader
from services.runtime.service import BAD_START_MARK, EXIT_BAD_START, EXIT_FAILURE, HURRY_SIGNAL, LOSS_SIGNAL

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Startup(Protocol):
    """Somebody who watches a group become ready."""

    def begin(self) -> None:
        """The children run."""

    def end(self) -> None:
        """The group is ending."""


@dataclass(frozen=True)
class Stop:
    """How the children are stopped: the signal they get, how long those of the first order have, then each later order.

    What has not ended by then is killed.
    """

    number: signal.Signals
    first_s: float
    later_s: float

    @classmethod
    def draining(cls, drain_timeout_s: float) -> Stop:
        """For SIGTERM. The children keep the drain time themselves; the margin is for their last words."""
        return cls(signal.SIGTERM, drain_timeout_s + 2.0, 3.0)


# After Ctrl-C or a death. Open streams end with an error, which takes no time; all is gone within 5 s whatever happens.
# Clients are told which of the two it was: the children get different signals.
_IN_HASTE = Stop(HURRY_SIGNAL, 2.0, 1.0)
_AFTER_DEATH = Stop(LOSS_SIGNAL, 2.0, 1.0)


class Supervisor:
    """Runs children until the first of them ends or a signal says stop; then ends all."""

    def __init__(self, specs: Sequence[ChildSpec], startup: Startup, drain: Stop) -> None:
        self._specs = specs
        self._startup = startup
        self._drain = drain
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._output = _Output()
        self._status = 0
        self._reason = ""  # once a child has died unasked: how
        self._stopping: Stop | None = None  # set once stopping
        self._stop_order = -1
        self._deadline_s: float | None = None  # once stopping: when those of the present order are killed

    def run(self) -> int:
        """Starts the children, returns the launcher's exit status when every one has ended. Main thread only."""
        with ExitStack() as stack:
            stack.callback(self._selector.close)
            signals = stack.enter_context(SignalReader(_SIGNALS, self._on_signal))
            self._selector.register(signals, selectors.EVENT_READ, signals.deliver)
            stack.callback(self._leave_nobody)  # whatever happens here, no child outlives it
            for spec in self._specs:
                self._start(spec)
            self._startup.begin()
            while self._children:
                for key, _ in self._selector.select(self._timeout_s()):
                    key.data()
                self._bury_the_dead()
                self._go_on_stopping()
        if self._reason and self._output.last_said != self._reason:
            self._output.say(self._reason)
        return self._status

    def _start(self, spec: ChildSpec) -> None:
        child = Child(spec)
        self._children.append(child)
        self._selector.register(child.output, selectors.EVENT_READ, lambda: self._forward(child))

    def _timeout_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return  # it has woken the loop, which looks at every child
        if self._stopping is not None and number == signal.SIGINT:
            self._output.say("killing what is left")
            self._kill_all()
        elif number == signal.SIGTERM:
            self._stop(self._drain, 0)
        else:
            self._stop(_IN_HASTE, EXIT_INTERRUPTED)

    def _bury_the_dead(self) -> None:
        dead = [child for child in self._children if child.has_ended()]
        # What could not start has told why; others that ended at the same time did so because of it.
        for child in sorted(dead, key=lambda child: child.status != EXIT_BAD_START):
            self._children.remove(child)
            self._stop_reading(child)
            self._output.pass_on(child.finish())
            if self._stopping is None and self._may_leave(child):
                self._output.say(f"{child.spec.name} has left")
            elif self._stopping is None:
                self._reason = child.describe_end()
                self._output.say(self._reason)
                self._stop(_AFTER_DEATH, EXIT_BAD_START if child.status == EXIT_BAD_START else EXIT_FAILURE)

    def _may_leave(self, child: Child) -> bool:
        is_replaced = any(other.spec.kind == child.spec.kind for other in self._children)
        return child.status == 0 and bool(child.spec.kind) and is_replaced

    def _go_on_stopping(self) -> None:
        if self._stopping is None:
            return
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self._kill(self._stop_order)
        if all(child.spec.stop_order != self._stop_order for child in self._children):
            self._stop_next(self._stopping.number, self._stopping.later_s)

    def _stop(self, stop: Stop, status: int) -> None:
        if self._stopping is None:
            self._stopping, self._status = stop, status
            self._startup.end()
            self._stop_next(stop.number, stop.first_s)

    def _stop_next(self, number: signal.Signals, patience_s: float) -> None:
        """Asks the children whose turn it is to end, and gives them that long."""
        self._deadline_s = time.monotonic() + patience_s
        self._stop_order = min((child.spec.stop_order for child in self._children), default=self._stop_order)
        for child in self._children:
            if child.spec.stop_order == self._stop_order:
                child.send_signal(number)

    def _kill(self, stop_order: int) -> None:
        self._deadline_s = None
        for child in self._children:
            if child.spec.stop_order == stop_order:
                self._output.say(f"{child.spec.name} did not end in time and is killed")
                child.kill_group()

    def _kill_all(self) -> None:
        for child in self._children:
            child.kill_group()

    def _forward(self, child: Child) -> None:
        self._output.pass_on(child.read_output())
        if child.output_has_ended:
            self._stop_reading(child)

    def _stop_reading(self, child: Child) -> None:
        if child.output in self._selector.get_map():
            self._selector.unregister(child.output)

    def _leave_nobody(self) -> None:
        for child in self._children:
            child.kill_and_wait()


class _Output:
    """Standard error: what the children print and what the supervisor says."""

    def __init__(self) -> None:
        self.last_said = ""
        """What the supervisor said, when nothing was written since."""

    def pass_on(self, lines: Sequence[bytes]) -> None:
        """Writes a child's lines, but for its reason not to start, which `describe_end` tells."""
        for line in lines:
            if not line.startswith(BAD_START_MARK):
                self._write(line)
                self.last_said = ""

    def say(self, text: str) -> None:
        """Writes a line of the supervisor's own."""
        self._write(f"tokenway: {text}\n".encode())
        self.last_said = text

    @staticmethod
    def _write(line: bytes) -> None:
        # A terminal that is gone or a log on a full disk must not end the server: serving never needs a write.
        with suppress(OSError):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
