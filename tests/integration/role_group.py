"""A group whose processes a test starts itself, one by one, in place of the launcher."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from services.wire.members import Role
from tests.integration.server import START_TIMEOUT_S, STOP_TIMEOUT_S, environment
from tests.unit.tokenizer.http_client import request

_LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:(\d+))")


@dataclass
class RoleGroup:
    """Processes by their role; `lines` is what all of them have printed."""

    processes: dict[Role, subprocess.Popen[str]] = field(default_factory=dict)
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def has_ended(self, within_s: float) -> bool:
        """Whether one of the processes ends within this time; waits for it."""
        with suppress(subprocess.TimeoutExpired):
            self.processes[Role.SCHEDULER].wait(within_s)
        return any(process.poll() is not None for process in self.processes.values())

    def log(self) -> str:
        """Everything printed so far."""
        return "".join(self.lines)


@contextmanager
def running_roles(
    command: Sequence[str], model: Path, worker_command: Sequence[str] = (), **settings: object
) -> Iterator[RoleGroup]:
    """One process of each role, ready, and gone afterwards.

    Args:
        command: the arguments for Python that start a process, such as `-m`, `package.{role}`.
        model: the model's file or folder.
        worker_command: those that start the worker, where it is another.
        settings: as in Settings.
    """
    group, urls = RoleGroup(), queue.Queue[str]()
    with tempfile.TemporaryDirectory(prefix="tw") as directory:
        settings.setdefault("numerics", "exact")
        variables = environment(model=model, run_dir=directory, instance="0", port=0, **settings)
        try:
            for role in Role:
                chosen = worker_command if worker_command and role is Role.GPU_WORKER else command
                words = [word.format(role=role) for word in chosen]
                group.processes[role] = process = subprocess.Popen(
                    [sys.executable, *words], env=variables, text=True, encoding="utf-8", errors="replace",
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
                threading.Thread(target=_read, args=(process, group.lines, urls), daemon=True).start()
            _wait_ready(group, urls)
            yield group
        finally:
            for process in group.processes.values():
                process.terminate()
            for process in group.processes.values():
                _end(process)


def _read(process: subprocess.Popen[str], lines: list[str], urls: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if match := _LISTENING.search(line):
            urls.put(match[1])
    process.stdout.close()


def _wait_ready(group: RoleGroup, urls: queue.Queue[str]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _is_ready(group, urls):
        if group.has_ended(within_s=0.1) or time.monotonic() > deadline_s:
            raise RuntimeError(f"the group did not become ready:\n{group.log()}")


def _is_ready(group: RoleGroup, urls: queue.Queue[str]) -> bool:
    if not group.url:
        with suppress(queue.Empty):
            group.url = urls.get_nowait()
    port = int(group.url.rpartition(":")[2] or 0)
    return bool(port) and request(port, "GET", "/ready").status == 200


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
