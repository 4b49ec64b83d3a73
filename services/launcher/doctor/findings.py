"""What a check found. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.launcher.terminal import Style, Terminal, harmless


class Verdict(StrEnum):
    """How a check came out. A warning is something that works, but not as well as it could."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, how it came out, what was found, and how to mend it ("" when nothing is to)."""

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name, Verdict.OK, text)


def warning(name: str, text: str, remedy: str = "") -> Finding:
    """It works, but."""
    return Finding(name, Verdict.WARNING, text, remedy)


def failed(name: str, text: str, remedy: str = "") -> Finding:
    """A server would not start, or not serve."""
    return Finding(name, Verdict.FAILED, text, remedy)


def has_failed(findings: Iterable[Finding]) -> bool:
    """Whether something must be mended."""
    return any(finding.verdict == Verdict.FAILED for finding in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The findings for programs."""
    return {"ok": not has_failed(findings), "checks": [dataclasses.asdict(finding) for finding in findings]}


_STYLES = {Verdict.OK: Style.GREEN, Verdict.WARNING: Style.YELLOW, Verdict.FAILED: Style.RED}
_NAME_WIDTH = 18


def lines_of(finding: Finding, terminal: Terminal) -> list[str]:
    """A finding for people: one line, and one more with the remedy."""
    mark = terminal.styled(f"{finding.verdict:8}", _STYLES[finding.verdict])
    lines = [f"{mark} {finding.name:{_NAME_WIDTH}} {harmless(finding.text)}"]
    if finding.remedy:
        lines.append(" " * (_NAME_WIDTH + 10) + terminal.styled("-> " + harmless(finding.remedy), Style.BOLD))
    return lines
