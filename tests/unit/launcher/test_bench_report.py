"""What a run came to: every figure against a plain computation, and the table that shows them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launcher.bench.answers import Answer
from services.launcher.bench.report import Report
from services.launcher.bench.summary import Summary, summarize
from services.launcher.cli import main
from tests.unit.launcher.openai_server import openai_server

times = st.floats(0.0005, 100)
good_answers = st.builds(
    Answer, first_s=st.floats(0.001, 1), total_s=st.floats(1, 10), gaps_s=st.lists(times, max_size=5),
    prompt_tokens=st.integers(1, 999), output_tokens=st.integers(0, 99), cached_tokens=st.integers(0, 9),
)  # fmt: skip
answers = st.lists(good_answers | st.builds(Answer, failure=st.sampled_from(["status 503: full", "gone"])), max_size=12)


def naive(values: list[float]) -> tuple[float, float, float]:
    """Mean, median and 99th percentile by their definitions, in milliseconds."""
    if not values:
        return 0.0, 0.0, 0.0
    ordered = sorted(Fraction(value) for value in values)
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    p99 = next(value for rank, value in enumerate(ordered, 1) if 100 * rank >= 99 * len(ordered))
    return tuple(float(1000 * value) for value in (sum(ordered) / len(ordered), median, p99))  # type: ignore[return-value]


def assert_same(summary: Summary, values: list[float]) -> None:
    found = (summary.mean_ms, summary.median_ms, summary.p99_ms)
    assert all(math.isclose(a, b, abs_tol=0.0006) for a, b in zip(found, naive(values), strict=True))


@given(st.lists(times, max_size=250))
def test_statistics_are_what_their_definitions_say(values: list[float]) -> None:
    assert_same(summarize(values), values)


@given(answers, st.floats(0.5, 100))
def test_a_report_counts_answers_without_failure_only(found: list[Answer], duration_s: float) -> None:
    report = Report.of(found, duration_s)
    good = [answer for answer in found if not answer.failure]
    assert report.requests == len(found)
    assert report.num_failed == len(found) - len(good)
    assert report.output_tokens == sum(answer.output_tokens for answer in good)
    assert report.input_tokens == sum(answer.prompt_tokens for answer in good)
    assert report.requests_per_s == pytest.approx(len(good) / duration_s, abs=0.001)
    assert report.output_tokens_per_s == pytest.approx(report.output_tokens / duration_s, abs=0.01)
    assert report.total_tokens_per_s == pytest.approx(
        (report.output_tokens + report.input_tokens) / duration_s, abs=0.01
    )
    assert_same(report.ttft, [answer.first_s for answer in good])
    assert_same(report.e2e, [answer.total_s for answer in good])
    assert_same(report.itl, [gap for answer in good for gap in answer.gaps_s])
    several = [answer for answer in good if answer.output_tokens > 1]
    assert_same(report.tpot, [(a.total_s - a.first_s) / (a.output_tokens - 1) for a in several])


def test_the_table_has_the_figures_of_other_load_tools() -> None:
    good = Answer(first_s=0.1, total_s=1.1, gaps_s=[0.5, 0.3], prompt_tokens=10, output_tokens=5, cached_tokens=4)
    lines = Report.of([good, good, Answer(failure="gone")], 2.0).table().splitlines()
    assert len({len(line) for line in lines}) == 1
    figures = dict(line.rsplit(":", 1) for line in lines if ":" in line)
    wanted = {
        "Successful requests": "2", "Failed requests": "1", "Duration (s)": "2.00", "Total input tokens": "20",
        "  of them from the cache": "8", "Total output tokens": "10", "Request throughput (req/s)": "1.00",
        "Output token throughput (tok/s)": "5.00", "Total token throughput (tok/s)": "15.00",
        "Mean TTFT (ms)": "100.00", "Median TPOT (ms)": "250.00", "Mean ITL (ms)": "400.00", "P99 ITL (ms)": "500.00",
        "P99 E2E (ms)": "1100.00",
    }  # fmt: skip
    assert {name: figures[name].strip() for name in wanted} == wanted
    names = {f"{kind} {name} (ms)" for kind in ("Mean", "Median", "P99") for name in ("TTFT", "TPOT", "ITL", "E2E")}
    assert names <= set(figures)


def test_times_that_nobody_has_seen_are_no_zeros() -> None:
    lines = Report.of([Answer(first_s=0.1, total_s=0.1, prompt_tokens=10, output_tokens=1)], 2.0).table().splitlines()
    figures = {name: value.strip() for name, value in (line.rsplit(":", 1) for line in lines if ":" in line)}
    assert (figures["Mean TTFT (ms)"], figures["Mean TPOT (ms)"], figures["P99 ITL (ms)"]) == ("100.00", "-", "-")


def test_a_run_without_an_answer_shows_its_failures_and_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "m", "--warm-up", "0", "--num-prompts", "3", "--input-tokens", "4"]
    with openai_server() as server:
        server.refusal = (503, "the queue is full")
        for command in (["bench"], ["bench", "serve"]):
            assert main([*command, "--url", server.url, *words]) == 1
            told = capsys.readouterr()
            assert told.out == ""
            assert told.err.splitlines() == [
                "tokenway: 3 x status 503: the queue is full",
                "tokenway: none of 3 requests succeeded: nothing was measured",
            ]
