"""The pulse of a process: a small file in the run directory that its work loop rewrites with each heartbeat.

A container's health check reads it. No pulse: the process has not joined its group yet. An old one: its loop is stuck,
though the process runs.

    python -m services.runtime.health RUN_DIR      status 0, or 1 and the reason; imports little: it runs often
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

PULSE_LIMIT_S = 10.0  # a step of the worker may take long, but not this long
_SUFFIX = ".pulse"
_RECORD_BYTES = 24


class Pulse:
    """The file of one process; `beat` is called by its work loop."""

    def __init__(self, directory: Path, name: str) -> None:
        """Makes the file, empty; `name` is unique in the directory."""
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC
        self._file = os.open(directory / f"{name}{_SUFFIX}", flags, 0o600)

    def beat(self) -> None:
        """Writes the time, in place."""
        with suppress(OSError):  # on a full disk the pulse grows old; serving goes on
            os.pwrite(self._file, f"{time.monotonic():.3f}".rjust(_RECORD_BYTES).encode(), 0)


def unhealthy_reason(directory: Path, now_s: float) -> str | None:
    """Why the processes of a run directory cannot be called healthy; None when every loop beats.

    Args:
        directory: the run directory.
        now_s: the present time of the monotonic clock, which all processes of a host share.
    """
    pulses = sorted(directory.glob(f"*{_SUFFIX}"))
    if not pulses:
        return f"nothing runs in {directory}"
    for path in pulses:
        record = path.read_text(encoding="ascii")
        if not record:
            return f"{path.stem} has not joined its group yet"
        age_s = now_s - float(record)
        if age_s > PULSE_LIMIT_S:
            return f"the loop of {path.stem} has not come round for {age_s:.0f} s"
    return None


if __name__ == "__main__":
    reason = unhealthy_reason(Path(sys.argv[1]), time.monotonic())
    print(reason or "healthy")
    sys.exit(reason is not None)
