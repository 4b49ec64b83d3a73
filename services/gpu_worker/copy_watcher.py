"""gpu_worker: a thread that waits for the device and wakes the loop when a result is on the host.

The loop waits on its socket and cannot wait for the device too. This thread touches nothing: it waits, and wakes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol


class Waitable(Protocol):
    """Something that is done at some time."""

    def wait_copied(self) -> None:
        """Returns when it is done, or raises when it never will be."""


class CopyWatcher:
    """Waits for steps in the order in which they were launched."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the thread after each of them."""
        self._wake = wake
        self._queue: SimpleQueue[Waitable] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, step: Waitable) -> None:
        """Wakes the loop when this one is done. The thread starts with the first."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="copy-watcher", daemon=True)
            self._thread.start()
        self._queue.put(step)

    def _run(self) -> None:
        while True:
            step = self._queue.get()
            with suppress(RuntimeError):  # an error of the device: the loop meets it too when it looks at the step
                step.wait_copied()
            self._wake()
