"""The comparison with another load tool: what is read of both reports, and when they agree."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.compare_with_guidellm import Figures, difference, parse_arguments, verdict, write_prompts
from services.launcher.bench.answers import Answer
from services.launcher.bench.report import Report
from services.launcher.bench.session_files import read_sessions

FIGURES = Figures(8, 256, 128, 100.0, 20.0, 500.0)


def test_the_prompts_are_what_our_tool_reads(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, parse_arguments(["--num-prompts", "3", "--words", "5", "--output-tokens", "7"]))
    turns = [session.turns[0] for session in read_sessions(path, 99, 99)]
    assert [(len(str(turn.prompt).split()), turn.output_tokens) for turn in turns] == [(5, 7)] * 3


def test_figures_are_read_of_both_reports() -> None:
    good = Answer(first_s=0.1, total_s=0.5, prompt_tokens=32, output_tokens=21)
    ours = dataclasses.asdict(Report.of([good, good, Answer(failure="gone")], 1.0))
    assert Figures.of_tokenway(json.loads(json.dumps(ours))) == Figures(2, 64, 42, 100.0, 20.0, 500.0)
    request = {
        "prompt_tokens": 32, "output_tokens": 21, "time_to_first_token_ms": 100.0, "inter_token_latency_ms": 20.0,
        "request_latency": 0.5,
    }  # fmt: skip
    theirs = {"benchmarks": [{"requests": {"successful": [request, request], "errored": [{}]}}]}
    assert Figures.of_guidellm(theirs) == Figures(2, 64, 42, 100.0, 20.0, 500.0)


@pytest.mark.parametrize(
    ("change", "agrees"),
    [({}, True), ({"ttft_ms": 109.0}, True), ({"ttft_ms": 111.0}, False), ({"output_tokens": 129}, False),
     ({"requests": 7}, False), ({"e2e_ms": 454.0}, False)],
)  # fmt: skip
def test_tokens_must_be_equal_and_medians_within_a_tenth(change: dict[str, float], agrees: bool) -> None:
    other = dataclasses.replace(FIGURES, **change)  # type: ignore[arg-type]
    table, found = verdict([FIGURES, FIGURES, FIGURES], [other, other, FIGURES])
    assert found == agrees
    assert "| ttft_ms " in table


def test_a_difference_is_a_share_of_the_smaller() -> None:
    assert difference(110, 100) == difference(100, 110) == pytest.approx(0.1)
    assert difference(0, 0) == 0
