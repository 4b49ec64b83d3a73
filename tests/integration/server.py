"""A real server for tests: `tokenway serve` with all its processes and the real model, on a free port."""

from __future__ import annotations

import functools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from services.runtime.service import die_with_parent

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0
_MAX_NOTE = 8000
_LISTENING = re.compile(r"ready after \S+ s: listening on (http://\S+)")  # a tokenizer listens before that


@dataclass
class Server:
    """A running group; `url` is where it listens, `lines` what it has printed so far (both streams)."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def log(self) -> str:
        """Everything printed so far."""
        return "".join(self.lines)

    def has_ended(self, within_s: float) -> bool:
        """Whether the launcher ends within this time; waits for it."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Sends a signal and waits for the end; returns the status."""
        self.process.send_signal(signum)
        return self.process.wait(timeout=timeout_s)


def environment(**settings: object) -> dict[str, str]:
    """The environment of a server with these settings (names as in Settings) and no others."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOKENWAY_")}
    own = {f"TOKENWAY_{name.upper()}": str(value) for name, value in settings.items()}
    return inherited | {"PYTHONUNBUFFERED": "1"} | own


def start(model: Path | str, **settings: object) -> Server:
    """Starts a server and returns at once; `wait_ready` waits for it. Exact numerics unless it is told of others."""
    settings.setdefault("numerics", "fast" if "dtype" in settings else "exact")
    command = [sys.executable, "-m", "services.launcher", "serve", str(model), "--port", str(settings.pop("port", 0))]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment(**settings),
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),  # also when the tests are killed
    )
    return Server(process)


def wait_ready(server: Server) -> None:
    """Reads what the server prints until it says where it listens; goes on reading behind the caller's back.

    Raises:
        RuntimeError: it ended or was not ready in time; the message holds what it printed.
    """
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert server.process.stdout is not None
        for line in server.process.stdout:
            server.lines.append(line)
            if match := _LISTENING.search(line):
                found.put(match[1])
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        url = found.get(timeout=START_TIMEOUT_S)
    except queue.Empty:
        url = None
    if url is None:
        raise RuntimeError(f"the server did not become ready:\n{server.log()}")
    server.url = url


@contextmanager
def running(model: Path | str, **settings: object) -> Iterator[Server]:
    """A server that is ready, and gone afterwards; what fails meanwhile is told with what the server said."""
    server = start(model, **settings)
    try:
        wait_ready(server)
        yield server
    except BaseException as error:
        error.add_note(f"the server's last words:\n{server.log()[-_MAX_NOTE:]}")
        raise
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGINT)
        if server.process.stdout is not None:
            server.process.stdout.close()
