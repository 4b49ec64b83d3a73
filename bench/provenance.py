"""Where a number comes from: the machine, the commit, the command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

_REPOSITORY = Path(__file__).parents[1]


def provenance() -> dict[str, str]:
    """What to keep beside every result."""
    return {
        "machine": _machine(),
        "commit": _commit(),
        "command": shlex.join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *map(_without_folder, sys.argv[1:])]),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _without_folder(argument: str) -> str:
    """A word of the command; of an absolute path only the name, its folder means nothing to anybody else."""
    flag, equals, value = argument.rpartition("=") if argument.startswith("-") else ("", "", argument)
    return f"{flag}{equals}{Path(value).name}" if Path(value).is_absolute() else argument


def _machine() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{_processor()}, {os.cpu_count()} cores, {pages / 2**30:.0f} GiB, {platform.system()} {platform.release()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit, with `+` when the tree differs from it; "unknown" outside a checkout."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
