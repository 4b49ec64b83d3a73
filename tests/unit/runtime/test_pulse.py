"""The pulse of a process, and what a health check makes of it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from services.runtime.health import PULSE_LIMIT_S, Pulse, unhealthy_reason

_ROOT = Path(__file__).parents[3]


def _check(directory: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "services.runtime.health", str(directory)]
    result = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=20)
    return result.returncode, result.stdout


def test_health_tells_a_beating_loop_from_a_stuck_one(tmp_path: Path) -> None:
    assert unhealthy_reason(tmp_path, time.monotonic()) == f"nothing runs in {tmp_path}"
    pulse = Pulse(tmp_path, "scheduler-0")
    assert unhealthy_reason(tmp_path, time.monotonic()) == "scheduler-0 has not joined its group yet"
    pulse.beat()
    now_s = time.monotonic()
    assert unhealthy_reason(tmp_path, now_s) is None
    late = unhealthy_reason(tmp_path, now_s + PULSE_LIMIT_S + 1)
    assert late is not None
    assert late.startswith("the loop of scheduler-0 has not come round for 11 s")


def test_the_command_ends_with_0_only_for_a_beating_loop(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path, "gpu_worker-0")
    assert _check(tmp_path) == (1, "gpu_worker-0 has not joined its group yet\n")
    pulse.beat()
    assert _check(tmp_path) == (0, "healthy\n")
    assert _check(tmp_path / "elsewhere")[0] == 1


def test_a_restarted_process_starts_without_a_pulse(tmp_path: Path) -> None:
    Pulse(tmp_path, "tokenizer-0").beat()
    Pulse(tmp_path, "tokenizer-0")
    assert unhealthy_reason(tmp_path, time.monotonic()) == "tokenizer-0 has not joined its group yet"
