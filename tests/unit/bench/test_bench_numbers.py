"""The numbers of the benches: percentiles, tables, workloads, the fake model, the pace of the fake worker."""

from __future__ import annotations

import random

import pytest

from bench import load, pipeline
from bench.fake_model import FakeModel, answer_ids, next_token
from bench.fake_worker import Pace
from bench.process_times import cpu_seconds
from bench.provenance import provenance
from services.launcher.bench.answers import Answer
from services.launcher.bench.report import Report
from services.launcher.bench.summary import Summary, markdown_table, summarize
from services.wire.columns import pack_int32, unpack_int32
from services.wire.request_params import SamplingParams
from services.wire.steps import NewRow, StepPlan, StepResult

PLAIN_IDS = list(range(100, 164))
SAMPLING = SamplingParams(0.0, 1.0, 0, 0.0, 1, 0)


def test_times_are_summed_up_by_nearest_rank() -> None:
    assert summarize([]) == Summary(0.0, 0.0, 0.0)
    assert summarize([0.5]) == Summary(500.0, 500.0, 500.0)
    shuffled = [number / 1000 for number in range(1, 201)]
    random.Random(1).shuffle(shuffled)
    assert summarize(shuffled) == Summary(100.5, 100.5, 198.0)


def test_tables_are_markdown() -> None:
    assert markdown_table(["a", "bb"], [["long name", "1"]]) == (
        "| a         | bb |\n|-----------|---:|\n| long name |  1 |"
    )


def test_the_table_of_results_counts_good_answers_and_bad() -> None:
    good = Answer(first_s=0.1, total_s=1.1, gaps_s=[0.5, 0.5], prompt_tokens=10, output_tokens=5, cached_tokens=4)
    report = Report.of([good, good, Answer(failure="status 503: full")], 2.0)
    assert "| 2       |        3 |      1 |" in load.table([(2, report)])


def test_two_loads_never_draw_the_same_prompts_unless_told_to() -> None:
    seeds = {load.parse_arguments([]).seed for _ in range(4)}
    assert len(seeds) > 1
    assert load.parse_arguments(["--seed", "7"]).seed == 7


@pytest.mark.parametrize(
    "arguments", [["--streams", "0"], ["--shared-prefix", "129"], ["--token-ids", "5", "5"], ["--output-tokens", "0"]]
)
def test_senseless_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load.parse_arguments(arguments)
    assert "must be" in capsys.readouterr().err or "--shared-prefix" in arguments[0]
    with pytest.raises(SystemExit):
        pipeline.parse_arguments(["--streams", "0"])


def plan_of(step: int, **columns: object) -> StepPlan:
    empty: dict[str, object] = dict.fromkeys(
        ("released_rows", "page_rows", "page_counts", "page_ids", "rows", "start_positions", "num_new_tokens"), b""
    )
    return StepPlan(**{"epoch": 1, "step": step, "new_rows": (), "samples": b"", **empty, **columns})  # type: ignore[arg-type]


def tokens_of(result: StepResult) -> list[tuple[int, int, int]]:
    return list(zip(*map(unpack_int32, (result.rows, result.first_indexes, result.token_ids)), strict=True))


def test_the_fake_model_gives_the_answer_that_follows_from_the_prompt() -> None:
    prompt = [100, 120, 140]
    expected = answer_ids(prompt, 3, PLAIN_IDS)
    assert set(expected) <= set(PLAIN_IDS)
    assert expected[0] == next_token(3, 140, PLAIN_IDS)
    model = FakeModel(PLAIN_IDS)
    row = NewRow(5, bytes(16), 2, pack_int32(prompt), 3, pack_int32([0]), SAMPLING)
    columns = {"rows": pack_int32([5]), "samples": b"\0"}
    first = plan_of(0, new_rows=(row,), start_positions=pack_int32([0]), num_new_tokens=pack_int32([2]), **columns)
    assert tokens_of(model.run(first, 1)) == []
    columns["samples"] = b"\1"
    one = pack_int32([1])
    steps = [plan_of(k, start_positions=pack_int32([1 + k]), num_new_tokens=one, **columns) for k in (1, 2, 3)]
    results = [model.run(step, 1) for step in steps]
    assert [tokens_of(result) for result in results] == [[(5, k, expected[k])] for k in range(3)]
    assert results[0].attempts == pack_int32([2])
    model.run(plan_of(4, released_rows=pack_int32([5])), 1)
    assert model.num_held == 0


def test_a_row_that_resumes_continues_its_answer() -> None:
    prompt = [100, 120, 140]
    expected = answer_ids(prompt, 6, PLAIN_IDS)
    model = FakeModel(PLAIN_IDS)
    row = NewRow(0, bytes(16), 0, pack_int32(prompt + expected[:4]), 3, pack_int32([0]), SAMPLING)
    columns = {"rows": pack_int32([0]), "samples": b"\1"}
    plan = plan_of(0, new_rows=(row,), start_positions=pack_int32([0]), num_new_tokens=pack_int32([7]), **columns)
    assert tokens_of(model.run(plan, 1)) == [(0, 4, expected[4])]


def test_steps_follow_each_other_without_gaps_when_plans_are_there_in_time() -> None:
    pace = Pace(step_s=0.025)
    assert pace.due_s(10.0) == 10.025
    assert pace.due_s(10.001) == 10.05
    assert pace.due_s(10.06) == pytest.approx(10.085)
    assert pace.due_s(99.0) == 99.025  # after a pause, which is none of the pace's
    assert pace.periods_s == pytest.approx([0.025, 0.035])


def test_numbers_know_where_they_come_from() -> None:
    facts = provenance()
    assert set(facts) == {"machine", "commit", "command", "python", "date"}
    assert "cores" in facts["machine"]
    assert facts["commit"]


def test_processor_time_of_a_process_grows() -> None:
    import os

    before = cpu_seconds(os.getpid())
    sum(range(2_000_000))
    assert cpu_seconds(os.getpid()) > before > 0
