"""A server that a command starts for itself: `tokenway serve` with all its processes, ended when the command ends."""

from __future__ import annotations

import functools
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from services.launcher.errors import CommandError
from services.launcher.progress import READY
from services.runtime.service import die_with_parent

_MAX_LINES = 200
_STOP_TIMEOUT_S = 15.0
_OWN_MARK = "tokenway: "


class OwnServer:
    """A running server; `url` is where it listens. Entered as a context it is gone afterwards."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None] = lambda line: None,
        start_timeout_s: float | None = None,
    ) -> None:
        """Starts it and waits until it is ready. Main thread only: it is killed when that thread ends.

        Args:
            arguments: of `tokenway serve`; the port is always a free one.
            environment: its variables.
            on_line: called, in another thread, with what it prints until it is ready.
            start_timeout_s: how long that may take; None for a model that may have to be fetched first.

        Raises:
            CommandError: it ended, or was not ready in time; the message is the last that it said.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.launcher", "serve", *arguments, "--port", "0"],
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C in a chat is for the answer, not for the server
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        self.lines: deque[str] = deque(maxlen=_MAX_LINES)
        """The last that it printed."""
        self._urls: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(on_line,), daemon=True).start()
        try:
            self.url = self._wait(start_timeout_s)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The process id of its launcher."""
        return self._process.pid

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, signum: int = signal.SIGINT, timeout_s: float = _STOP_TIMEOUT_S) -> int:
        """Sends a signal, waits for the end and returns the status; what does not end in time is killed."""
        if self._process.poll() is None:
            self._process.send_signal(signum)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it
            return self._process.wait(_STOP_TIMEOUT_S)

    def _wait(self, timeout_s: float | None) -> str:
        try:
            url = self._urls.get(timeout=timeout_s)
        except queue.Empty:
            raise CommandError(f"the server was not ready within {timeout_s:.0f} s") from None
        if url is None:
            said = [line for line in self.lines if line.startswith(_OWN_MARK)] or list(self.lines)
            raise CommandError((said or ["the server ended without a word"])[-1].removeprefix(_OWN_MARK))
        return url

    def _read(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        is_ready = False
        with self._process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))
                if not is_ready:
                    on_line(line.rstrip("\n"))
                if match := READY.search(line):
                    is_ready = True
                    self._urls.put(match[1])
        self._urls.put(None)
