"""Signals a process again and again, as somebody does who wants it gone."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress

from tests.sockets import wait_until


def insist(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Sends the signal until the process has ended."""

    def has_ended() -> bool:
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        return process.returncode is not None

    wait_until(has_ended)
