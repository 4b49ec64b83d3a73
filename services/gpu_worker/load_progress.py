"""gpu_worker: what is seen and sent while weights are read."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_LOG_EVERY_S = 5.0

logger = logging.getLogger(__name__)


class LoadProgress:
    """The progress callback of loading: pumps, and moves a bar on a terminal, elsewhere logs how far it is."""

    def __init__(self, name: str, pump: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._pump = pump
        self._clock = clock
        self._told_s = clock()
        self._bar = Progress(
            TextColumn("loading {task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task(name, total=None)

    def __enter__(self) -> LoadProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, num_bytes: int, num_bytes_total: int) -> None:
        """So many bytes have been read."""
        self._bar.update(self._task, completed=num_bytes, total=num_bytes_total)
        now_s = self._clock()
        if self._bar.disable and now_s - self._told_s >= _LOG_EVERY_S:
            self._told_s = now_s
            logger.info("loading %s: %.0f of %.0f MB", self._name, num_bytes / 1e6, num_bytes_total / 1e6)
        self._pump()
