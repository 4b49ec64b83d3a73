"""A server of its own for a measurement: `tokenway serve` with all its processes, on a free port."""

from __future__ import annotations

import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from services.runtime.config import inherited_environment

_REPOSITORY = Path(__file__).parents[1]
_START_TIMEOUT_S = 300.0
_READY = re.compile(r"ready after \S+ s: listening on (http://\S+)")


class ServerError(Exception):
    """The server did not start; the message holds what it printed."""


class OwnServer:
    """A running server; `url` is where it listens."""

    def __init__(self, model: str, arguments: Sequence[str] = ()) -> None:
        """Starts it and waits until it is ready.

        Args:
            model: what to serve, as for `tokenway serve`.
            arguments: further flags of it.

        Raises:
            ServerError: it ended, or was not ready in time.
        """
        command = [sys.executable, "-m", "services.launcher", "serve", model, "--port", "0", *arguments]
        self._process = subprocess.Popen(
            command, env=inherited_environment() | {"PYTHONUNBUFFERED": "1"}, cwd=_REPOSITORY, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._lines: list[str] = []
        self._urls: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            url = self._urls.get(timeout=_START_TIMEOUT_S)
        except queue.Empty:
            url = None
        if url is None:
            self._process.kill()
            raise ServerError("the server did not become ready:\n" + "".join(self._lines))
        self.url = url

    @property
    def processes(self) -> dict[str, psutil.Process]:
        """All its processes by name, the launcher first."""
        launcher = psutil.Process(self._process.pid)
        named = {"launcher": launcher}
        for child in launcher.children():
            role = child.cmdline()[-1].removeprefix("services.")
            named[role if role not in named else f"{role} {child.pid}"] = child
        return named

    def stop(self, signum: int = signal.SIGINT, timeout_s: float = 60) -> int:
        """Sends a signal, waits for the end and returns the status."""
        self._process.send_signal(signum)
        return self._process.wait(timeout_s)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if match := _READY.search(line):
                self._urls.put(match[1])
        self._urls.put(None)
