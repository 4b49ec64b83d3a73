"""What is known of a group as lines, and as one JSON value. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.launcher.terminal import aligned, cut, harmless
from services.launcher.top.samples import Window
from services.launcher.top.stages import Load, Stage, Worker, load_of, stages_of, workers_of

_HEAD = ("STAGE", "HARDWARE", "BOUND", "TIME", "BUSY", "TOKENS/s", "GB/s", "GFLOP/s", "OF LIMIT")
_RIGHT = range(3, len(_HEAD))
_HARDWARE_COLUMNS = 22


@dataclass(frozen=True)
class View:
    """A group at one moment."""

    url: str
    model: str
    window_s: float | None
    load: Load
    workers: Sequence[Worker]
    stages: Sequence[Stage]

    @classmethod
    def of(cls, url: str, model: str, window: Window) -> View:
        """From its metrics."""
        return cls(url, model, window.seconds, load_of(window), workers_of(window), stages_of(window))

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """For people; without colours, and without anything that a terminal would obey."""
        over = "since the start" if self.window_s is None else f"over {self.window_s:.0f} s"
        rows = [_HEAD, *(_row(stage) for stage in self.stages)]
        lines = [f"{self.model} at {self.url}, {over}", *map(_worker_line, self.workers), _load_line(self.load), ""]
        return [harmless(line) for line in [*lines, *aligned(rows, right=_RIGHT)]]


def _worker_line(worker: Worker) -> str:
    where = f"{worker.name}, {worker.threads} threads" if worker.device == "cpu" else worker.name
    return (
        f"worker {worker.instance} on {where}: limits {worker.bytes_per_s / 1e9:,.1f} GB/s from memory, "
        f"{worker.operations_per_s / 1e9:,.0f} GFLOP/s of {worker.dtype} products"
    )


def _load_line(load: Load) -> str:
    pages = max(1, load.kv_pages)
    text = (
        f"requests {load.running} running, {load.waiting} waiting; "
        f"KV pages {load.kv_used / pages:.0%} used, {load.kv_cached / pages:.0%} cached of {load.kv_pages:,}"
    )
    if load.output_tokens_per_s is None:
        return text
    return f"{text}; {load.output_tokens_per_s:,.1f} output tokens/s, {load.prompt_tokens_per_s or 0:,.1f} of prompts"


def _row(stage: Stage) -> tuple[str, ...]:
    return (
        stage.name,
        cut(stage.hardware, _HARDWARE_COLUMNS),
        stage.bound or "-",
        f"{stage.seconds:.2f} s",
        _percent(stage.busy),
        _number(stage.per_second(stage.num_tokens), 1, ",.0f"),
        _number(stage.per_second(stage.num_bytes), 1e9, ",.2f"),
        _number(stage.per_second(stage.num_operations), 1e9, ",.1f"),
        _percent(stage.share),
    )


def _number(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None else format(value / unit, form)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
