"""Tokenizer process: a request's way, hop by hop, from its record: for /trace, for spans, for metrics. Pure.

    http      [head ....................................................... last byte]   this process
    tokenize  [head .. asked for]                                                        this process
    queue                       [... first plan]                                         scheduler
    prefill                                    [... first token]                         scheduler
    decode                                                      [... last token]         scheduler
    detokenize                                                  [...]                    detokenizer

A hop is there when its process has told of it; the clocks are those of the processes, so over several hosts hops may
seem to overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.tokenizer.request_record import RequestRecord
from services.wire.answers import HopReport
from services.wire.endpoints import Identity
from services.wire.members import Role

FIRST_TOKEN_US = "first_token_us"
"""Counter of a scheduler's report: from the request's coming to its first token; not there before that."""
ENDED = "ended"
"""Counter of a scheduler's last report about an answer."""
_NOT_SHOWN = frozenset({FIRST_TOKEN_US, ENDED, "prefill_us"})  # the times are hops of their own


class HopName(StrEnum):
    """The parts of a request's way."""

    HTTP = "http"
    TOKENIZE = "tokenize"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    DETOKENIZE = "detokenize"


@dataclass(frozen=True, slots=True)
class Hop:
    """One part of the way. `request_id` is the answer's, b"" for what all answers of a request share.

    `wait_us` and `work_us` follow each other from `start_unix_us` on, by the wall clock of its process.
    """

    name: HopName
    role: Role
    instance: str
    request_id: bytes
    start_unix_us: int
    wait_us: int
    work_us: int
    counters: Mapping[str, float] = field(default_factory=dict)


def hops_of(record: RequestRecord, own: Identity) -> list[Hop]:
    """Every hop of a request that is known, in the order in which a request meets them.

    Args:
        record: Of an ended request, or of an open one as far as it is.
        own: This process.
    """
    return [*_own_hops(record, own), *(hop for report in record.reports.values() for hop in hops_of_report(report))]


def hops_of_report(report: HopReport) -> Iterator[Hop]:
    """The hops that one process tells of."""
    counters = {name: value for name, value in report.counters.items() if name not in _NOT_SHOWN}
    if report.role is not Role.SCHEDULER:
        yield _hop(report, HopName.DETOKENIZE, 0, report.wait_us, report.work_us, counters)
        return
    first_token_us = int(report.counters.get(FIRST_TOKEN_US, 0))
    yield _hop(report, HopName.QUEUE, 0, report.wait_us, 0, {})
    if not first_token_us:
        yield _hop(report, HopName.PREFILL, report.wait_us, 0, report.work_us, counters)
        return
    prefill_us = max(0, first_token_us - report.wait_us)
    yield _hop(report, HopName.PREFILL, report.wait_us, 0, prefill_us, {})
    yield _hop(report, HopName.DECODE, first_token_us, 0, max(0, report.work_us - prefill_us), counters)


def _hop(
    report: HopReport, name: HopName, start_us: int, wait_us: int, work_us: int, counters: Mapping[str, float]
) -> Hop:
    start = report.started_unix_us + start_us
    return Hop(name, report.role, report.instance, report.request_id, start, wait_us, work_us, counters)


def _own_hops(record: RequestRecord, own: Identity) -> Iterator[Hop]:
    start = record.received_unix_us
    yield Hop(HopName.HTTP, own.role, own.instance, b"", start, 0, round(record.duration_s * 1e6))
    if record.submitted_s:
        work_us = record.unix_us(record.submitted_s) - start
        counters = {"prompt_tokens": float(record.prompt_tokens), "cached_tokens": float(record.cached_tokens)}
        yield Hop(HopName.TOKENIZE, own.role, own.instance, b"", start, 0, work_us, counters)
