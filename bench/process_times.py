"""How much processor time a process has used so far."""

from __future__ import annotations

from pathlib import Path

import psutil


def cpu_seconds(process_id: int) -> float:
    """Seconds on a processor, user and system, all threads that still live: to the nanosecond where Linux tells."""
    tasks = Path(f"/proc/{process_id}/task")
    try:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
    except (OSError, ValueError, IndexError):
        times = psutil.Process(process_id).cpu_times()
        return float(times.user + times.system)
