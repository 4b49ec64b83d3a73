"""Signals as events of a loop: each one that arrives is a byte on a socket, read in the order of arrival.

The same on Linux and macOS; a child's death arrives as SIGCHLD, so no second mechanism is needed for it.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType


class SignalReader:
    """While entered, the given signals do nothing but become readable here. Main thread only.

    A hang-up that was ignored when the launcher started (nohup) stays ignored.
    """

    def __init__(self, numbers: Sequence[signal.Signals], handle: Callable[[int], None]) -> None:
        self._numbers = [number for number in numbers if number != signal.SIGHUP or not _is_ignored(number)]
        self._handle = handle
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> SignalReader:
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers_before = [signal.signal(number, _note) for number in self._numbers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in zip(self._numbers, self._handlers_before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """The descriptor that is readable when a signal has arrived."""
        return self._reader.fileno()

    def deliver(self) -> None:
        """Handles every signal that has arrived."""
        with suppress(BlockingIOError):
            for number in self._reader.recv(4096):
                self._handle(number)


def _note(number: int, frame: FrameType | None) -> None:
    """Python writes the wake-up byte only for a signal that has a handler."""


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN
