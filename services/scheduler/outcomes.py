"""scheduler: what comes out of a core besides plans."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.request import Request
from services.wire.finish import Finish


@dataclass(slots=True)  # not frozen: one is made for each token, and a frozen one costs three times as much
class Produced:
    """New tokens of a request, from output index `first_index` on, and why it ended if it did."""

    request: Request
    first_index: int
    token_ids: list[int]
    finish: Finish
