"""gpu_worker: what is seen and sent while weights are read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


class LoadProgress:
    """The progress callback of loading: pumps, and moves a bar where standard error is a terminal."""

    def __init__(self, name: str, pump: Callable[[], None]) -> None:
        self._pump = pump
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
        self._pump()
