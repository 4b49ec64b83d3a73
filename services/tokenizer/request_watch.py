"""Tokenizer process: what is written down about requests as they begin and end: record, log line, metrics, spans.

The one place that the HTTP side tells. Owns the ring of records; costs a request some microseconds at its end and
nothing for a token.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from aiohttp import web

from services.runtime.histogram import HOP_BOUNDS_S, LATENCY_BOUNDS_S, REQUEST_BOUNDS_S, TOKEN_BOUNDS, Histogram
from services.runtime.logs import about
from services.tokenizer.access import Caller
from services.tokenizer.api_error import Code
from services.tokenizer.hops import ENDED, HopName, hops_of_report
from services.tokenizer.key_budgets import KeyBudgets
from services.tokenizer.request_record import AnswerSummary, RequestRecord, begin_record
from services.tokenizer.request_ring import RequestRing
from services.wire.answers import HopReport
from services.wire.finish import Finish
from services.wire.members import Role

_REASONS = {
    Finish.STOP_TOKEN: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.TIMEOUT: "timeout",
    Finish.ABORTED: "abort",
}
_REASONS_OF_UNENDED: Mapping[str, str] = {
    "": "abort",
    Code.ABORTED: "abort",
    Code.TIMEOUT: "timeout",
    Code.DRAINING: "drain",
}
REASONS = ("stop", "length", "abort", "timeout", "drain", "error")

_ROUTINE = (200, 503)

logger = logging.getLogger(__name__)


class SpanSink(Protocol):
    """Where ended requests go as spans."""

    def add(self, record: RequestRecord) -> None:
        """One has ended; returns at once."""

    async def close(self) -> None:
        """Hands on what waits, for a moment at most."""


class RequestWatch:
    """Begins and ends the record of every request."""

    def __init__(self, capacity: int, budgets: KeyBudgets, *, logs_requests: bool, spans: SpanSink | None) -> None:
        """`capacity`: how many ended requests are kept for /trace; `spans`: None for nowhere."""
        self.ring = RequestRing(capacity)
        self.hop_s = {str(name): Histogram(HOP_BOUNDS_S) for name in HopName}
        """Time in each hop; the queue's is what a request waited."""
        self.inference_s = Histogram(REQUEST_BOUNDS_S)
        """From an answer's first plan to its last token."""
        self.output_token_s = Histogram(LATENCY_BOUNDS_S)
        """Mean time of an answer's tokens after the first."""
        self.answer_tokens = Histogram(TOKEN_BOUNDS)
        self.longest_answer_tokens = Histogram(TOKEN_BOUNDS)
        self.finished = Counter(dict.fromkeys(REASONS, 0))
        """Ended answers by how they ended."""
        self.num_over_budget = 0
        """Requests refused because their key had used up what it may."""
        self._budgets = budgets
        self._level = logging.INFO if logs_requests else logging.DEBUG
        self._spans = spans
        self._paying: set[RequestRecord] = set()

    def begin(self, request: web.BaseRequest) -> RequestRecord:
        """The head of a request has come; `end` must follow."""
        return begin_record(request, self.ring.add)

    def enter(self, record: RequestRecord, caller: Caller) -> None:
        """It was admitted as somebody's request for work, which counts against the budgets of their key.

        Raises:
            ApiError: 429: the key has used up what it may.
        """
        record.tenant = caller.tenant
        if not self._budgets.are_set or caller.is_operator:
            return
        try:
            self._budgets.enter(caller.tenant, time.monotonic())
        except Exception:
            self.num_over_budget += 1
            raise
        self._paying.add(record)

    def end(self, record: RequestRecord, route: str, status: int) -> None:
        """Its answer has left, or its client."""
        record.end(route, status)
        if record in self._paying:
            self._paying.remove(record)
            num_tokens = record.prompt_tokens + record.output_tokens
            self._budgets.leave(record.tenant, num_tokens, time.monotonic())
        self.hop_s[HopName.HTTP].observe(record.duration_s)
        if record.request_id:
            self._end_answers(record)
        is_routine = not record.tenant and status in _ROUTINE  # somebody looks whether the server lives
        level = logging.DEBUG if is_routine else self._level
        if logger.isEnabledFor(level):
            _log(record, level)

    def take(self, report: HopReport) -> None:
        """Another process tells how an answer fared there."""
        record = self.ring.take(report)
        if record is None or (report.role is Role.SCHEDULER and ENDED not in report.counters):
            return
        for hop in hops_of_report(report):
            self.hop_s[hop.name].observe((hop.wait_us + hop.work_us) / 1e6)
        if report.role is Role.SCHEDULER:
            self.inference_s.observe(report.work_us / 1e6)

    def _end_answers(self, record: RequestRecord) -> None:
        self.ring.end(record)
        if record.submitted_s:
            self.hop_s[HopName.TOKENIZE].observe(record.submitted_s - record.received_s)
        if record.was_taken:  # what was never begun has not ended either
            self._count(record.answers)
        if self._spans is not None:
            self._spans.add(record)

    def _count(self, answers: Sequence[AnswerSummary]) -> None:
        for answer in answers:
            self.finished[reason_of(answer)] += 1
            self.answer_tokens.observe(answer.output_tokens)
            if answer.output_tokens > 1:
                answering_s = answer.last_token_s - answer.first_token_s
                self.output_token_s.observe(answering_s / (answer.output_tokens - 1))
        self.longest_answer_tokens.observe(max(answer.output_tokens for answer in answers))


def reason_of(answer: AnswerSummary) -> str:
    """One of REASONS: how an answer ended; one whose client left first was aborted.

    One that had not ended when its request failed has that failure's reason.
    """
    if answer.finish is Finish.NONE:
        return _REASONS_OF_UNENDED.get(answer.failure, "error")
    return _REASONS.get(answer.finish, "error")


def _log(record: RequestRecord, level: int) -> None:
    ttft_s = record.first_token_s
    fields: dict[str, object] = {
        "route": record.route,
        "status": record.status,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "ttft_ms": None if ttft_s is None else round(1000 * ttft_s, 3),
        "duration_ms": round(1000 * record.duration_s, 3),
        "tenant": record.tenant,
    }
    told = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    logger.log(level, "request ended: %s", told, extra=about(record.request_id or record.refusal_id, **fields))
