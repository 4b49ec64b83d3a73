"""One child process: how it is started, what it prints, how it ended.

A child leads a session and process group of its own, so that Ctrl-C in the terminal reaches the launcher alone and so
that what the child itself started can be ended with it.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from services.runtime.service import BAD_START_MARK, die_with_parent

_MAX_LINE_BYTES = 8192
_DUMP_HEAD = "Fatal Python error"  # of faulthandler
_ABORT_REASONS = ("what():", "terminate called")
_READ_BYTES = 65536
_MAX_LAST_READS = 64
_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ChildSpec:
    """What to start.

    Attributes:
        name: how people know it, such as `tokenizer-0`.
        command: the program and its arguments.
        environment: all of its variables.
        stop_order: children of a lower order are stopped, and have ended, before those of a higher one.
        kind: children of one kind stand in for each other, so one that was told to end may; "" when none can.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    stop_order: int
    kind: str = ""


class Child:
    """A started process. Its standard output and error arrive as one stream of lines."""

    def __init__(self, spec: ChildSpec) -> None:
        """Starts it; must be called from the launcher's main thread, because it is killed when that thread ends.

        Raises:
            OSError: the program cannot be started.
        """
        self.spec = spec
        self.last_line = ""
        self._is_dumping = False
        self.output_has_ended = False
        self._pending = b""
        # The tie to the launcher is made before the program runs: a launcher killed while a child still imports its
        # modules leaves nothing behind.
        self._process = subprocess.Popen(
            spec.command,
            env=dict(spec.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)

    @property
    def status(self) -> int | None:
        """None while it runs; then its exit status, or minus the number of the signal that killed it."""
        return self._process.returncode

    def has_ended(self) -> bool:
        """Whether it has ended; what it had started itself is then killed."""
        if self._process.poll() is None:
            return False
        self.kill_group()
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the child alone; nothing happens when it has ended."""
        self._process.send_signal(number)

    def kill_group(self) -> None:
        """Kills the child and all that it started and that stayed in its group."""
        with suppress(ProcessLookupError, PermissionError):  # nobody is left (macOS: only a zombie is left)
            os.killpg(self._process.pid, signal.SIGKILL)

    def read_output(self) -> list[bytes]:
        """The whole lines that have arrived, line ends included; `output_has_ended` tells when no more will come.

        A line longer than 8 KiB comes in pieces; bytes that are no text are passed on as they are.
        """
        try:
            data = os.read(self.output, _READ_BYTES)
        except BlockingIOError:
            return []
        self.output_has_ended = not data
        lines = (self._pending + (data or b"\n" * bool(self._pending))).splitlines(keepends=True)
        self._pending = b""
        if lines and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) <= _MAX_LINE_BYTES:
            self._pending = lines.pop()
        for line in lines:
            self._note(line.decode(errors="backslashreplace").strip())
        return lines

    def _note(self, line: str) -> None:
        """Keeps a line as the last one. A dump of stacks says less than its head, and than what C++ said before it."""
        if self._is_dumping or not line:
            return
        self._is_dumping = line.startswith(_DUMP_HEAD)
        if not (self._is_dumping and self.last_line.startswith(_ABORT_REASONS)):
            self.last_line = line

    def finish(self) -> list[bytes]:
        """What is left of its output, which is closed; for a child that has ended."""
        lines: list[bytes] = []
        for _ in range(_MAX_LAST_READS):  # a descendant that left the group may hold the other end and go on writing
            if self.output_has_ended:
                break
            lines += self.read_output()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return lines

    def kill_and_wait(self) -> None:
        """Ends the child and its group at once."""
        self.kill_group()
        self._process.wait(_KILL_TIMEOUT_S)

    def describe_end(self) -> str:
        """How it ended, in words, with the last line that it printed."""
        assert self.status is not None
        mark = BAD_START_MARK.decode()
        if self.last_line.startswith(mark):
            return f"cannot start: {self.last_line.removeprefix(mark)}"
        how = f"ended with status {self.status}" if self.status >= 0 else f"was killed by {_signal_name(-self.status)}"
        return f"{self.spec.name} {how}" + (f"; the last it printed: {self.last_line}" if self.last_line else "")


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return name + " (by somebody, or by the kernel because memory ran out)" * (number == signal.SIGKILL)
