"""Records of requests: what is kept, how hops are told, what a traceparent says. No process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.access import Caller
from services.tokenizer.answer_sinks import CollectedAnswers
from services.tokenizer.api_error import ApiError, Code
from services.tokenizer.hops import ENDED, FIRST_TOKEN_US, HopName, hops_of, hops_of_report
from services.tokenizer.key_budgets import KeyBudgets
from services.tokenizer.request_record import ParentSpan, RequestRecord, parent_span
from services.tokenizer.request_ring import RequestRing
from services.tokenizer.request_watch import RequestWatch, reason_of
from services.tokenizer.stream_table import StreamTable
from services.wire.answers import HopReport
from services.wire.columns import pack_int32
from services.wire.endpoints import Identity
from services.wire.finish import Finish
from services.wire.members import Role
from services.wire.request_params import SamplingParams, TextParams
from services.wire.requests import Refused, Submit
from tests.unit.tokenizer.backend_peers import chunk

OWN = Identity(Role.TOKENIZER, "t")


def submit(number: int, group: int | None = None) -> Submit:
    request_id = number.to_bytes(16, "big")
    return Submit(
        request_id=request_id,
        attempt=0,
        prompt_token_ids=pack_int32([1, 2, 3]),
        output_token_ids=b"",
        sampling=SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, choice=0),
        text=TextParams(stop=(), include_stop_str_in_output=False, skip_special_tokens=True, min_tokens=0),
        max_tokens=10,
        stop_token_ids=b"",
        group_id=request_id if group is None else group.to_bytes(16, "big"),
        tenant="t",
        cache_root=b"",
        priority=0,
        deadline_ms=0,
    )


def report(number: int, role: Role = Role.SCHEDULER, counters: Mapping[str, float] = MappingProxyType({})) -> HopReport:
    return HopReport(
        request_id=number.to_bytes(16, "big"),
        attempt=0,
        role=role,
        instance="x",
        started_unix_us=1_000_000,
        wait_us=200,
        work_us=1000,
        counters=dict(counters),
    )


def in_loop(work: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(work())


def record_with(table: StreamTable, ring: RequestRing, submits: Sequence[Submit]) -> RequestRecord:
    """The record of a request whose answers have been asked for; they get no text."""
    record = RequestRecord(None, ring.add)
    sink = CollectedAnswers([])
    record.opened(table.open(submits, sink, record.received_s))
    return record


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ([], "abort"),  # its client left
        ([ApiError(503, "", code=Code.DRAINING)], "drain"),
        ([ApiError(503, "", code=Code.DRAINING), ApiError(503, "", code=Code.BACKEND_LOST)], "drain"),
        ([ApiError(503, "", code=Code.BACKEND_LOST)], "error"),
        ([ApiError(503, "", code=Code.ABORTED)], "abort"),
        ([ApiError(504, "", code=Code.TIMEOUT)], "timeout"),
    ],
)
def test_what_had_not_ended_has_the_reason_of_the_failure(errors: list[ApiError], reason: str) -> None:
    async def work() -> None:
        table, ring, record = StreamTable(), RequestRing(10), RequestRecord(None, lambda record: None)
        opened = table.open([submit(1), submit(2, group=1)], CollectedAnswers([]), record.received_s)
        record.opened(opened)
        opened.entries[0].finish = Finish.STOP_TOKEN
        for error in errors:
            opened.fail(error)
        record.end("/v1/completions", 200)
        ring.end(record)
        assert [reason_of(answer) for answer in record.answers] == ["stop", reason]

    in_loop(work)


# ---------------------------------------------------------------- the ring


def test_a_record_is_found_by_the_id_of_any_of_its_answers_in_any_spelling() -> None:
    async def work() -> None:
        ring = RequestRing(10)
        record = record_with(StreamTable(), ring, [submit(1), submit(2, group=1)])
        for number in (1, 2):
            digits = number.to_bytes(16, "big").hex()
            for name in (
                digits,
                f"chatcmpl-{digits}",
                f"cmpl-{digits}",
                f"msg_{digits}",
                f"resp_{digits}",
                f"my-own_x-{digits}",
            ):
                assert ring.find(name) is record
        for name in (
            "",
            "x",
            "-" + 32 * "0",
            31 * "0",
            33 * "0",
            32 * "g",
            (3).to_bytes(16, "big").hex(),
            "../" + 32 * "0",
        ):
            assert ring.find(name) is None

    in_loop(work)


@given(st.integers(1, 5), st.integers(0, 30))
def test_the_last_ended_are_kept_and_nothing_else_stays(capacity: int, count: int) -> None:
    async def work() -> None:
        ring = RequestRing(capacity)
        table = StreamTable()
        for number in range(1, count + 1):
            record = record_with(table, ring, [submit(2 * number), submit(2 * number + 1)])
            record.end("/v1/completions", 200)
            ring.end(record)
        assert ring.num_ended == min(capacity, count)
        kept = [number for number in range(1, count + 1) if ring.find((2 * number).to_bytes(16, "big").hex())]
        assert kept == list(range(1, count + 1))[-capacity:]
        assert len(ring._by_answer) == 2 * len(kept)

    in_loop(work)


def test_a_request_without_an_answer_leaves_nothing() -> None:
    ring = RequestRing(3)
    record = RequestRecord(None, ring.add)
    record.end("/v1/models", 200)
    ring.end(record)
    assert (ring.num_ended, record.request_id, list(record.answers)) == (0, "", [])


def test_reports_are_filed_also_after_the_end_and_lost_ones_counted() -> None:
    async def work() -> None:
        ring = RequestRing(1)
        record = record_with(StreamTable(), ring, [submit(1)])
        assert ring.take(report(1)) is record
        record.end("/v1/completions", 200)
        ring.end(record)
        assert ring.take(report(1, counters={ENDED: 1})) is record
        assert ring.take(report(1, Role.DETOKENIZER)) is record
        assert ring.take(report(9)) is None
        assert len(record.reports) == 2  # the last word of each process
        assert ring.num_lost_reports == 1

    in_loop(work)


def test_an_ended_record_holds_numbers_only() -> None:
    async def work() -> None:
        table, ring = StreamTable(), RequestRing(5)
        record = record_with(table, ring, [submit(1), submit(2, group=1)])
        (opened,) = record._opened
        table.take(chunk(opened.entries[0].submit, 0, [7, 8], 0, "hi", Finish.STOP_STRING, cached=2), 5.0)
        record.end("/v1/completions", 200)
        first, second = record.answers
        assert (first.finish, first.output_tokens, first.cached_tokens) == (Finish.STOP_STRING, 2, 2)
        assert (second.finish, second.output_tokens) == (Finish.NONE, 0)
        assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (
            3,
            2,
            2,
        )  # one prompt, two answers
        assert record._opened == []

    in_loop(work)


# ---------------------------------------------------------------- hops


def test_the_scheduler_s_report_is_cut_into_queue_prefill_and_decode() -> None:
    queue, prefill, decode = hops_of_report(report(1, counters={FIRST_TOKEN_US: 500, ENDED: 1, "steps": 4.0}))
    assert (queue.name, queue.start_unix_us, queue.wait_us, queue.work_us) == (HopName.QUEUE, 1_000_000, 200, 0)
    assert (prefill.name, prefill.start_unix_us, prefill.work_us) == (HopName.PREFILL, 1_000_200, 300)
    assert (decode.name, decode.start_unix_us, decode.work_us) == (HopName.DECODE, 1_000_500, 700)
    assert decode.counters == {"steps": 4.0}


def test_without_a_first_token_there_is_no_decode() -> None:
    queue, prefill = hops_of_report(report(1, counters={"steps": 1.0}))
    assert (queue.wait_us, prefill.work_us, prefill.counters) == (200, 1000, {"steps": 1.0})


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_hops_of_a_report_follow_each_other_and_none_is_negative(wait_us: int, work_us: int, first_us: int) -> None:
    told = replace(report(1, counters={FIRST_TOKEN_US: first_us}), wait_us=wait_us, work_us=work_us)
    hops = list(hops_of_report(told))
    assert all(hop.wait_us >= 0 and hop.work_us >= 0 for hop in hops)
    assert hops[0].start_unix_us == told.started_unix_us
    if wait_us <= first_us <= wait_us + work_us and first_us:
        ends = [hop.start_unix_us + hop.wait_us + hop.work_us for hop in hops]
        assert [hop.start_unix_us for hop in hops[1:]] == ends[:-1]
        assert ends[-1] == told.started_unix_us + wait_us + work_us


def test_the_hops_of_a_request_come_in_their_order() -> None:
    async def work() -> None:
        ring = RequestRing(1)
        record = record_with(StreamTable(), ring, [submit(1)])
        ring.take(report(1, counters={FIRST_TOKEN_US: 500}))
        ring.take(report(1, Role.DETOKENIZER, {"chunks": 2.0}))
        hops = hops_of(record, OWN)
        assert [hop.name for hop in hops] == list(HopName)
        assert [hop.role for hop in hops] == [Role.TOKENIZER] * 2 + [Role.SCHEDULER] * 3 + [Role.DETOKENIZER]

    in_loop(work)


# ---------------------------------------------------------------- what is counted


def test_an_answer_is_counted_once_in_the_histograms_however_often_it_is_reported() -> None:
    async def work() -> None:
        watch = RequestWatch(5, KeyBudgets(0, 0), logs_requests=False, spans=None)
        table = StreamTable()
        record = record_with(table, watch.ring, [submit(1)])
        watch.enter(record, Caller("t"))
        watch.take(report(1, counters={FIRST_TOKEN_US: 500}))
        watch.take(report(1, counters={FIRST_TOKEN_US: 500, ENDED: 1}))
        watch.take(report(1, Role.DETOKENIZER))
        watch.end(record, "/v1/completions", 200)
        counts = {name: histogram.buckets()[-1][1] for name, histogram in watch.hop_s.items()}
        assert counts == dict.fromkeys(map(str, HopName), 1)
        assert watch.inference_s.total == pytest.approx(0.001)
        assert watch.finished == {"stop": 0, "length": 0, "abort": 1, "timeout": 0, "drain": 0, "error": 0}

    in_loop(work)


@pytest.mark.parametrize(("status", "code"), [(400, "invalid_grammar"), (503, "queue_full")])
def test_a_request_that_is_refused_is_no_finished_answer(status: int, code: str) -> None:
    async def work() -> None:
        watch = RequestWatch(5, KeyBudgets(0, 0), logs_requests=False, spans=None)
        table = StreamTable()
        record = record_with(table, watch.ring, [submit(1), submit(2, group=1)])
        taken = [record.was_taken]
        table.refuse(Refused(submit(2).request_id, 0, status, code, "no", "", 0))
        taken.append(record.was_taken)
        watch.end(record, "/v1/completions", status)
        assert [*taken, record.was_taken] == [True, False, False]
        assert not any(watch.finished.values())
        for counted in (watch.answer_tokens, watch.longest_answer_tokens, watch.output_token_s):
            assert counted.buckets()[-1][1] == 0

    in_loop(work)


# ---------------------------------------------------------------- traceparent

TRACE, SPAN = 32 * "a", 16 * "b"


def test_a_traceparent_is_read() -> None:
    assert parent_span(f"00-{TRACE}-{SPAN}-01") == ParentSpan(int(TRACE, 16), int(SPAN, 16), True)
    assert parent_span(f" 00-{TRACE}-{SPAN}-02 ") == ParentSpan(int(TRACE, 16), int(SPAN, 16), False)
    assert parent_span(f"cc-{TRACE}-{SPAN}-01-what-comes-later") == ParentSpan(int(TRACE, 16), int(SPAN, 16), True)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{32 * '0'}-{SPAN}-01",
        f"00-{TRACE}-{16 * '0'}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        "00-" + "a" * 100_000,
    ],
)
def test_a_traceparent_in_another_form_is_none(header: str) -> None:
    found = parent_span(header)
    assert found is None or header.endswith("\n")  # white space around it is none of its form


@given(st.text(max_size=80))
def test_no_text_breaks_the_reading_of_a_traceparent(text: str) -> None:
    parent_span(text)
