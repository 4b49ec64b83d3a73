"""A status line of a command that works for long: for how many seconds it has worked, and what it does now.

Written anew each second, so that somebody who waits sees that it goes on, also while nothing is told. Where a line
cannot be written over there is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from services.launcher.terminal import Terminal

_TICK_S = 1.0


class RunningStatus:
    """While entered, the line is there; afterwards it is gone. It is written by a thread of its own."""

    def __init__(
        self, terminal: Terminal, clock: Callable[[], float] = time.monotonic, tick_s: float = _TICK_S
    ) -> None:
        """Takes the terminal, seconds from any beginning, and how long the line stands before it is written anew."""
        self._terminal = terminal
        self._clock = clock
        self._tick_s = tick_s
        self._begin_s = clock()
        self._text = ""
        self._is_over = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="status", daemon=True)

    def __enter__(self) -> RunningStatus:
        self._begin_s = self._clock()
        if self._terminal.is_interactive:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._terminal.is_interactive:
            return
        with self._news:
            self._is_over = True
            self._news.notify()
        self._thread.join()
        self._terminal.clear_status()

    def show(self, text: str) -> None:
        """What is done now; of what is said faster than a line can be read the newest stands."""
        with self._news:
            self._text = text
            self._news.notify()

    def line(self, text: str) -> None:
        """Prints a line on standard output that stays, which may be the same terminal; the status goes on below it."""
        with self._news:
            self._terminal.clear_status()
            print(text, flush=True)
            self._news.notify()

    def _write(self) -> None:
        with self._news:
            while not self._is_over:
                if self._text:
                    self._terminal.status(f"{self._clock() - self._begin_s:.0f} s: {self._text}")
                self._news.wait(self._tick_s)
