"""A process that is told to stop: with time to drain, or without."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.runtime.service import HURRY_SIGNAL, LOSS_SIGNAL

_ROOT = Path(__file__).parents[3]
_SERVICE = """
from services.runtime.service import run_service
from services.wire.members import Role
from services.wire.transport import BlockingReceiver

def main(process):
    receiver = BlockingReceiver([])
    process.on_stop = receiver.interrupt
    print("ready", flush=True)
    while not process.is_stopping:
        receiver.receive_batch(600)
    print(process.drain_timeout_s, process.has_lost_peer, flush=True)

run_service(Role.SCHEDULER, main)
"""


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGTERM, "7.5 False"), (HURRY_SIGNAL, "0.0 False"), (LOSS_SIGNAL, "0.0 True")]
)
def test_a_stopping_process_drains_unless_it_is_hurried(number: signal.Signals, said: str) -> None:
    command = [sys.executable, "-c", _SERVICE, "--drain-timeout-s", "7.5"]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == f"{said}\n"
    assert process.returncode == 0
