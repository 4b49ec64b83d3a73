"""The timings of a request, from its journal entries and the scheduler's report."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.answer_sinks import CollectedAnswers
from services.tokenizer.journal import JournalEntry
from services.tokenizer.open_request import OpenRequest
from services.tokenizer.pending_answer import PendingAnswer
from services.tokenizer.timings import timings_of
from services.wire.answers import HopReport
from services.wire.members import Role
from tests.unit.tokenizer.test_journal import new_submit


def opened(num_answers: int = 1) -> OpenRequest:
    async def make() -> OpenRequest:
        entries = [JournalEntry(new_submit()) for _ in range(num_answers)]
        return OpenRequest(entries, CollectedAnswers([PendingAnswer() for _ in entries]), 10.0)

    return asyncio.run(make())


def test_a_request_without_tokens_and_reports_knows_nothing() -> None:
    assert timings_of(opened(), 1) == {
        "queue_ms": None,
        "prefill_ms": None,
        "ttft_ms": None,
        "itl_ms": {"p50": None, "p99": None},
        "cached_tokens": 0,
        "tokens_per_second": None,
    }


def test_times_are_from_the_first_token_of_all_answers_to_the_last() -> None:
    request = opened(2)
    for entry, first_s, last_s in zip(request.entries, (10.5, 11.0), (12.5, 12.0), strict=True):
        entry.first_token_s, entry.last_token_s, entry.next_index, entry.cached_tokens = first_s, last_s, 5, 7
    request.gaps_s.extend([0.5] * 8)
    report = HopReport(b"\0" * 16, 0, Role.SCHEDULER, "s", 0, 250_000, 9, {"prefill_us": 125_000.0})
    request.reports[Role.SCHEDULER] = report
    timings = timings_of(request, num_choices=2)
    assert (timings["queue_ms"], timings["prefill_ms"], timings["ttft_ms"]) == (250.0, 125.0, 500.0)
    assert timings["itl_ms"] == {"p50": 500.0, "p99": 500.0}
    assert (timings["cached_tokens"], timings["tokens_per_second"]) == (7, 4.0)
    assert timings_of(request, num_choices=1)["cached_tokens"] == 14


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=300))
def test_a_percentile_is_the_smallest_gap_that_so_many_do_not_exceed(gaps_ms: list[int]) -> None:
    request = opened()
    request.gaps_s.extend(gap / 1000 for gap in gaps_ms)
    found = timings_of(request, 1)["itl_ms"]
    assert isinstance(found, dict)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        naive = min(gap for gap in gaps_ms if sum(other <= gap for other in gaps_ms) >= share * len(gaps_ms))
        assert found[name] == pytest.approx(naive, rel=1e-5)
