"""Starts the worker process: `python -m services.gpu_worker`."""

import functools
import os
from pathlib import Path

from services.runtime.config import set_library_variable
from services.runtime.service import Process, StartError, run_service
from services.wire.members import Role


def main(process: Process) -> None:
    """Looks whether the model is there before anything large is loaded, then serves."""
    model = process.settings.model
    if not Path(model).exists():
        raise StartError(f"{model}: no such folder or file (names and aliases are for `tokenway serve`)")
    # Nobody hears of this process before the link to the scheduler is made: it can end in the midst of an import.
    process.on_stop = functools.partial(os._exit, 0)
    if process.is_stopping:
        return
    # Threads that wait for each other must sleep: spinning they keep the cores from the other processes, and a step
    # takes five to ten times as long as soon as anything else runs. Read when torch is loaded.
    set_library_variable("OMP_WAIT_POLICY", "PASSIVE")
    from services.gpu_worker import service  # torch takes seconds

    service.main(process)


if __name__ == "__main__":
    run_service(Role.GPU_WORKER, main)
