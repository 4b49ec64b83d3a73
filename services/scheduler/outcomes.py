"""scheduler: what comes out of a core besides plans, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.request import Request
from services.wire.messages import Finish


@dataclass(slots=True)  # not frozen: one is made for each token, and a frozen one costs three times as much
class Produced:
    """New tokens of a request, from output index `first_index` on, and why it ended if it did."""

    request: Request
    first_index: int
    token_ids: list[int]
    finish: Finish


@dataclass(slots=True)
class CoreCounters:
    """What happened so far; these only grow."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    admitted: int = 0
    retracted: int = 0
    dropped_rows: int = 0
    failed_rows: int = 0
