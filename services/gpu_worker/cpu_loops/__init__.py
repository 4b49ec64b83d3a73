"""gpu_worker: loops of our own for CPUs, compiled by numba where it is installed.

A decode step of a small model runs hundreds of operators that each compute for some microseconds and cost as much again
to be called. Here they are fewer, and each does in one pass what takes torch several. Every loop stands beside the
plain torch way that it must equal; without numba, or on a processor that it was not written for, the plain way runs.

No module below but this one is imported before `loops_problem` has said that there is none.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
from pathlib import Path

from services.runtime.config import set_library_variable, user_directory


@functools.cache
def loops_problem() -> str | None:
    """Why the loops cannot run here, or None: they can. The first call imports numba."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    keeps_compiled()
    logging.getLogger("numba").setLevel(logging.WARNING)  # it tells all that it does, thousands of lines for each loop
    try:
        importlib.import_module("numba")
    except (ImportError, OSError) as error:  # its or LLVM's parts do not fit what else is installed
        return f"numba cannot be imported ({error})"
    from services.gpu_worker.cpu_loops.team import TEAM

    return None if TEAM is not None else "torch has no OpenMP library here whose threads they could use"


@functools.cache
def keeps_compiled() -> bool:
    """Whether compiled loops can be kept for the next start; the first call, before numba is imported, says where."""
    directory = _cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    set_library_variable("NUMBA_CACHE_DIR", str(directory))
    return os.access(directory, os.W_OK)


def _cache_directory() -> Path:
    """Where compiled loops are kept: a folder for each state of the sources, because numba looks at single files."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    caches = user_directory("XDG_CACHE_HOME", Path.home() / ".cache")
    return caches / "tokenway" / "loops" / digest.hexdigest()[:16]
