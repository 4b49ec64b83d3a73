"""Tokenizer process: what is known of one HTTP request for people: who, what, when, and each hop of its answers.

Made when its head has come, complete when its answer has left; then it holds numbers only, no prompt and no text. Times
are this process's monotonic clock; the wall clock is read once, at the beginning.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from aiohttp import web

from services.runtime.logs import request_of_task
from services.tokenizer.journal import JournalEntry
from services.tokenizer.open_request import OpenRequest
from services.wire.answers import HopReport
from services.wire.columns import REQUEST_ID_BYTES
from services.wire.finish import Finish
from services.wire.members import Role

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
ReportKey = tuple[bytes, Role, str]


@dataclass(frozen=True, slots=True)
class ParentSpan:
    """The caller's own span, from its header `traceparent`."""

    trace_id: int
    span_id: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class AnswerSummary:
    """How one answer of a request fared; times by this process's monotonic clock, 0 where it did not come so far.

    `is_first`: whether it is the first of the answers to its prompt. `failure`: the error code of its request.
    """

    request_id: bytes
    is_first: bool
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_s: float
    last_token_s: float
    failure: str = ""


class RequestRecord:
    """One HTTP request. `route`, `status` and `ended_s` are set at its end."""

    __slots__ = (
        "_answers", "_index", "_opened", "_was_taken", "admitted_s", "ended_s", "parent", "received_s",
        "received_unix_us", "refusal_id", "reports", "request_id", "route", "status", "submitted_s", "tenant",
    )  # fmt: skip

    def __init__(self, parent: ParentSpan | None, index: Callable[[RequestRecord], None]) -> None:
        """`index` is called whenever answers were asked for."""
        self.received_s = time.monotonic()
        self.received_unix_us = time.time_ns() // 1000
        self.parent = parent
        self.tenant = ""
        self.route = "other"
        self.status = 0
        self.ended_s = 0.0
        self.request_id = ""
        """The id of its first answer; "" for a request that asked for none, or was refused before."""
        self.refusal_id = ""
        """What stands for it in the answer and the log of a request that was refused before."""
        self.submitted_s = 0.0
        self.admitted_s = 0.0
        self.reports: dict[ReportKey, HopReport] = {}
        self._index = index
        self._opened: list[OpenRequest] = []
        self._answers: tuple[AnswerSummary, ...] = ()
        self._was_taken = False

    def opened(self, opened: OpenRequest) -> None:
        """Answers have been asked for, for this request; most do so once."""
        if not self.request_id:
            self.request_id = opened.entries[0].request_id.hex()
            self.submitted_s = opened.submitted_s
            request_of_task.set(self.request_id)
        self._opened.append(opened)
        self._index(self)

    def id_for_failure(self) -> str:
        """By what a client and the log call it when it fails: the id of its first answer, or one drawn now."""
        if not self.request_id and not self.refusal_id:
            self.refusal_id = secrets.token_hex(REQUEST_ID_BYTES)
            request_of_task.set(self.refusal_id)
        return self.request_id or self.refusal_id

    def end(self, route: str, status: int) -> None:
        """Its answer has left, or its client."""
        self.route, self.status, self.ended_s = route, status, time.monotonic()
        self._answers = tuple(self.answers)
        self.admitted_s = max((opened.admitted_s for opened in self._opened), default=0.0)
        self._was_taken = self.was_taken
        self._opened = []

    @property
    def answers(self) -> Sequence[AnswerSummary]:
        """Its answers as they stand now."""
        if self.has_ended and not self._opened:
            return self._answers
        return [_summary(entry, opened.failure) for opened in self._opened for entry in opened.entries]

    @property
    def has_ended(self) -> bool:
        """Whether its answer has left."""
        return self.ended_s > 0

    @property
    def was_taken(self) -> bool:
        """Whether answers were asked for and none was refused."""
        return self._was_taken or (bool(self._opened) and not any(opened.was_refused for opened in self._opened))

    @property
    def duration_s(self) -> float:
        """From its head to the end of its answer, or until now."""
        return (self.ended_s or time.monotonic()) - self.received_s

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its head to the first token of any of its answers; None when none came."""
        times = [answer.first_token_s for answer in self.answers if answer.first_token_s]
        return min(times) - self.received_s if times else None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts, each counted once."""
        return sum(answer.prompt_tokens for answer in self.answers if answer.is_first)

    @property
    def cached_tokens(self) -> int:
        """How many of them came from the prefix cache."""
        return sum(answer.cached_tokens for answer in self.answers if answer.is_first)

    @property
    def output_tokens(self) -> int:
        """Tokens of its answers."""
        return sum(answer.output_tokens for answer in self.answers)

    def take(self, report: HopReport) -> None:
        """A process tells how an answer fared there; the last word of each counts."""
        self.reports[report.request_id, report.role, report.instance] = report
        for opened in self._opened:
            if any(entry.request_id == report.request_id for entry in opened.entries):
                opened.reports[report.role] = report

    def unix_us(self, time_s: float) -> int:
        """A time of this process's monotonic clock by the wall clock, in microseconds."""
        return self.received_unix_us + round((time_s - self.received_s) * 1e6)


_present: ContextVar[RequestRecord] = ContextVar("present")


def begin_record(request: web.BaseRequest, index: Callable[[RequestRecord], None]) -> RequestRecord:
    """The record of a request whose head has come; the task that answers it finds it by `present_record`."""
    record = RequestRecord(parent_span(request.headers.get("traceparent", "")), index)
    _present.set(record)
    request_of_task.set("")
    return record


def present_record() -> RequestRecord:
    """The record of the request that the present task answers."""
    return _present.get()


def parent_span(header: str) -> ParentSpan | None:
    """What `traceparent` says; None for none, and for what is not in the form of W3C Trace Context."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None or header.startswith("ff") or (header.startswith("00") and match[4]):
        return None
    trace_id, span_id = int(match[1], 16), int(match[2], 16)
    return ParentSpan(trace_id, span_id, bool(int(match[3], 16) & 1)) if trace_id and span_id else None


def _summary(entry: JournalEntry, failure: str) -> AnswerSummary:
    return AnswerSummary(
        request_id=entry.request_id,
        is_first=entry.submit.group_id == entry.request_id,
        finish=entry.finish,
        prompt_tokens=entry.num_prompt_tokens,
        cached_tokens=entry.cached_tokens,
        output_tokens=entry.completion_tokens or entry.next_index,
        first_token_s=entry.first_token_s,
        last_token_s=entry.last_token_s,
        failure=failure,
    )
