"""The pulse of a process: a small file in the run directory, rewritten by its work loop with each heartbeat.

A container's health check reads it: a process that runs but whose loop is stuck has a pulse that grows old.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from services.wire.messages import State

PULSE_LIMIT_S = 10.0  # a step of the worker may take long, but not this long
_SUFFIX = ".pulse"
_RECORD_BYTES = 40


class Pulse:
    """The file of one process; `beat` is called by its work loop."""

    def __init__(self, directory: Path, name: str) -> None:
        """Makes the file; `name` is unique in the directory."""
        self._file = os.open(directory / f"{name}{_SUFFIX}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def beat(self, state: State) -> None:
        """Writes state and time, in place."""
        record = f"{state.name} {time.monotonic():.3f}".ljust(_RECORD_BYTES - 1) + "\n"
        with suppress(OSError):  # on a full disk the pulse grows old; serving goes on
            os.pwrite(self._file, record.encode(), 0)


def unhealthy_reason(directory: Path, now_s: float) -> str | None:
    """Why the processes of a run directory cannot be called healthy; None when every loop beats and none is starting.

    Args:
        directory: the run directory.
        now_s: the present time of the monotonic clock, which all processes of a host share.
    """
    pulses = sorted(directory.glob(f"*{_SUFFIX}"))
    if not pulses:
        return f"no process has begun to work in {directory}"
    for path in pulses:
        words = path.read_text(encoding="ascii").split()
        if len(words) != 2 or words[0] not in State.__members__:
            return f"{path.stem} has not begun to work"
        if State[words[0]] == State.STARTING:
            return f"{path.stem} is starting"
        age_s = now_s - float(words[1])
        if age_s > PULSE_LIMIT_S:
            return f"the loop of {path.stem} has not come round for {age_s:.0f} s"
    return None
