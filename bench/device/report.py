"""The outcome of one check, and all of them as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from services.launcher.bench.summary import markdown_table


class Status(Enum):
    """How a check ended."""

    OK = "ok"
    FAILED = "FAILED"
    SKIPPED = "skipped"
    MEASURED = "measured"


@dataclass(frozen=True)
class Outcome:
    """One line of the report: what was looked at, how it ended, and the figure or the reason."""

    name: str
    status: Status
    figure: str


def held(name: str, is_right: bool, figure: str) -> Outcome:
    """Of something that must hold."""
    return Outcome(name, Status.OK if is_right else Status.FAILED, figure)


def measured(name: str, figure: str) -> Outcome:
    """Of something that is only measured."""
    return Outcome(name, Status.MEASURED, figure)


def skipped(name: str, reason: str) -> Outcome:
    """Of something that could not be looked at here."""
    return Outcome(name, Status.SKIPPED, reason)


def table(outcomes: Sequence[Outcome]) -> str:
    """All of them, for people."""
    return markdown_table(
        ["check", "status", "figure"], [[each.name, each.status.value, each.figure] for each in outcomes]
    )
