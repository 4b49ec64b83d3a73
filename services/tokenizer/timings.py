"""Tokenizer process: how long each step of a request's way took, for the client that asked. Pure.

Queue and prefill are the scheduler's own word; they are null as long as it has not come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.tokenizer.open_request import OpenRequest
from services.wire.members import Role


def timings_of(opened: OpenRequest, num_choices: int) -> dict[str, object]:
    """The timings of a request whose answers have ended.

    Args:
        opened: The request.
        num_choices: n: each prompt's cached tokens count once.
    """
    entries = opened.entries
    report = opened.reports.get(Role.SCHEDULER)
    prefill_us = None if report is None else report.counters.get("prefill_us")
    firsts = [entry.first_token_s for entry in entries if entry.first_token_s]
    gaps_s = sorted(opened.gaps_s)
    return {
        "queue_ms": None if report is None else _ms(report.wait_us / 1e6),
        "prefill_ms": None if prefill_us is None else _ms(prefill_us / 1e6),
        "ttft_ms": _ms(min(firsts) - opened.received_s) if firsts else None,
        "itl_ms": {"p50": _percentile_ms(gaps_s, 0.50), "p99": _percentile_ms(gaps_s, 0.99)},
        "cached_tokens": sum(entry.cached_tokens for entry in entries[::num_choices]),
        "tokens_per_second": _rate(opened, firsts),
    }


def _rate(opened: OpenRequest, firsts: Sequence[float]) -> float | None:
    """Tokens behind the first of each answer by the time from the first token of all to the last."""
    num_later = sum(entry.next_index - 1 for entry in opened.entries if entry.next_index)
    if not num_later:
        return None
    elapsed_s = max(entry.last_token_s for entry in opened.entries) - min(firsts)
    return round(num_later / elapsed_s, 2) if elapsed_s > 0 else None


def _percentile_ms(gaps_s: Sequence[float], share: float) -> float | None:
    """The smallest gap that is not exceeded by this share of all."""
    return _ms(gaps_s[math.ceil(len(gaps_s) * share) - 1]) if gaps_s else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
