"""How requests fare in the scheduler: what they used, the reports about them, and what is counted over all."""

from __future__ import annotations

import time

import pytest

from services.scheduler import group
from services.scheduler.core_counters import CoreCounters
from services.scheduler.usage import Usage
from services.wire.answers import HopReport, StopFound
from services.wire.columns import pack_int32
from services.wire.controls import Control, ControlAction
from services.wire.finish import Finish
from services.wire.members import Role, Telemetry
from services.wire.requests import Refused
from services.wire.samples import unpack_samples
from services.wire.steps import CompileGrammar, GrammarCompiled, StepPlan
from tests.unit.scheduler.core_driver import Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit
from tests.unit.scheduler.scheduler_group import Pipeline, id_of, run_all, running_pipeline, worker_card

PROMPT = list(range(1, 12))


def reports_of(pipeline: Pipeline, number: int) -> list[HopReport]:
    return [report for report in pipeline.tokenizer.of(HopReport) if report.request_id == id_of(number)]


def last_report(pipeline: Pipeline, number: int) -> HopReport:
    pipeline.group.pump(lambda: any("ended" in report.counters for report in reports_of(pipeline, number)))
    return reports_of(pipeline, number)[-1]


@pytest.fixture(autouse=True)
def _frequent_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "TELEMETRY_INTERVAL_S", 0.03)


def metrics_of(pipeline: Pipeline) -> dict[str, float]:
    """The scheduler's samples by name and labels, as told from now on."""
    num_before = len(pipeline.tokenizer.of(Telemetry))
    pipeline.group.pump(lambda: len(pipeline.tokenizer.of(Telemetry)) > num_before + 1)
    (member,) = (each for each in pipeline.tokenizer.of(Telemetry)[-1].members if each.role is Role.SCHEDULER)
    samples = unpack_samples(member.metrics)
    parts = {key: key.split("\x1f")[2:] for key in samples}
    prefix = "tokenway:scheduler_"
    return {",".join([names[0].removeprefix(prefix), *names[1:]]): samples[key] for key, names in parts.items()}


def wait_for(pipeline: Pipeline, name: str, value: float) -> dict[str, float]:
    """The first samples among which one has this value."""
    metrics = metrics_of(pipeline)
    for _ in range(100):
        if metrics[name] == value:
            return metrics
        metrics = metrics_of(pipeline)
    pytest.fail(f"{name} is {metrics[name]}, never {value}")


# ---------------------------------------------------------------- what a request used


@pytest.mark.parametrize("plans_ahead", [0, 3])
def test_a_request_that_runs_alone_used_every_step(plans_ahead: int) -> None:
    driver = Driver(new_limits(64, 4, chunk_tokens=4, plans_ahead=plans_ahead))
    answer = driver.submit(new_submit(1, PROMPT, 6))
    driver.run()
    used = answer.request.usage.counters(driver.core.counters, 0)
    assert used == {"steps": 8, "chunks": 3, "pages": 4, "retractions": 0, "forward_us": 8, "step_us": 8}


def test_steps_before_and_after_a_row_are_not_its_requests() -> None:
    driver = Driver(new_limits(64, 4, max_rows=1))
    answers = [driver.submit(new_submit(number, [number, *PROMPT], 5)) for number in (1, 2)]
    driver.run()
    assert driver.core.counters.steps == 11  # the last one only lets go of the row
    for answer in answers:
        assert answer.request.usage.counters(driver.core.counters, 0)["steps"] == 5


def test_a_retracted_request_adds_up_what_it_used_in_all_its_rows() -> None:
    driver = Driver(new_limits(40, 1), is_reckless=True)
    answers = [driver.submit(new_submit(number, [number] * 8, 25)) for number in (1, 2)]
    driver.run()
    used = [answer.request.usage.counters(driver.core.counters, 0) for answer in answers]
    assert sum(each["retractions"] for each in used) == driver.core.counters.retracted > 0
    assert all(25 <= each["steps"] <= driver.core.counters.steps for each in used)
    assert max(each["pages"] for each in used) == 32


def test_a_request_that_leaves_before_its_first_step_came_back_used_none() -> None:
    usage, counters = Usage(), CoreCounters(steps=5)
    usage.leave_row(counters, 3)
    counters.steps += 1
    assert usage.counters(counters, 0) == {
        "steps": 0,
        "chunks": 0,
        "pages": 3,
        "retractions": 0,
        "forward_us": 0,
        "step_us": 0,
    }


def test_what_cores_counted_is_added_by_name() -> None:
    sums = CoreCounters(steps=1, cached_tokens=2)
    sums.add(CoreCounters(steps=3, step_us=7))
    assert (sums.steps, sums.cached_tokens, sums.step_us) == (4, 2, 7)


# ---------------------------------------------------------------- reports


def test_a_report_comes_with_the_first_token_and_one_at_the_end() -> None:
    before_us = int(1e6 * time.time())
    with running_pipeline(plans_ahead=1) as pipeline:
        run_all(pipeline, [new_submit(1, PROMPT, 6)])
        run_all(pipeline, [new_submit(2, PROMPT, 6)])
        end = last_report(pipeline, 2)
        first, last = reports_of(pipeline, 2)
        assert last is end
        assert (first.role, first.instance, first.attempt) == (Role.SCHEDULER, "s", 0)
        assert "ended" not in first.counters
        assert first.counters["first_token_us"] == last.counters["first_token_us"] > 0
        assert last.counters["prefill_us"] == last.counters["first_token_us"] - last.wait_us
        assert 0 <= first.work_us <= last.work_us
        expected: dict[str, float] = {
            "prompt_tokens": 11,
            "cached_tokens": 8,
            "output_tokens": 6,
            "chunks": 1,
            "steps": 6,
            "pages": 4,
        }
        expected |= {"retractions": 0, "forward_us": 6, "step_us": 6, "plans_ahead": 1, "ended": 1.0}
        assert {name: last.counters[name] for name in expected} == expected
        for report in (first, last):
            assert before_us <= report.started_unix_us <= int(1e6 * time.time())


def test_time_in_the_queue_is_waiting_and_time_in_a_row_is_work() -> None:
    with running_pipeline() as pipeline:
        pipeline.tokenizer.send(Control(1, ControlAction.PAUSE))
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5, deadline_ms=60))
        end = last_report(pipeline, 1)
        assert end.wait_us >= 50_000
        assert (end.work_us, end.counters["steps"]) == (0, 0)
        assert "first_token_us" not in end.counters


def test_the_wait_for_a_grammar_is_told_as_a_part_of_the_queue() -> None:
    with running_pipeline() as pipeline:
        pipeline.tokenizer.send(new_submit(1, PROMPT, 3, grammar="a+"))
        pipeline.group.pump(lambda: bool(pipeline.gpu_worker.of(CompileGrammar)))
        pipeline.gpu_worker.send(GrammarCompiled(id_of(1), 0))
        end = last_report(pipeline, 1)
        assert 0 < end.counters["grammar_us"] <= end.wait_us


def test_an_answer_of_one_token_has_one_report() -> None:
    with running_pipeline() as pipeline:
        run_all(pipeline, [new_submit(1, PROMPT, 1), new_submit(2, PROMPT, 0)])
        assert "first_token_us" in last_report(pipeline, 1).counters
        assert "first_token_us" not in last_report(pipeline, 2).counters
        assert [len(reports_of(pipeline, number)) for number in (1, 2)] == [1, 1]


def test_who_is_refused_is_not_reported() -> None:
    with running_pipeline() as pipeline:
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5, grammar="(", deadline_ms=20))
        pipeline.group.pump(lambda: bool(pipeline.tokenizer.of(Refused)))
        run_all(pipeline, [new_submit(2, PROMPT, 2)])
        last_report(pipeline, 2)
        assert reports_of(pipeline, 1) == []
        assert metrics_of(pipeline)["refused_requests_total"] == 1


def test_an_answer_is_counted_once_though_two_processes_end_it() -> None:
    """By its length here, and then by a stop string that the detokenizer found before."""
    with running_pipeline() as pipeline:
        pipeline.acknowledges = False
        run_all(pipeline, [new_submit(1, PROMPT, 6)])
        last_report(pipeline, 1)
        pipeline.detokenizer.send(StopFound(id_of(1), pack_int32([0]), pack_int32([3])))
        run_all(pipeline, [new_submit(2, PROMPT, 2)])
        last_report(pipeline, 2)
        assert sum("ended" in report.counters for report in reports_of(pipeline, 1)) == 1
        assert metrics_of(pipeline)["finished_total,reason=length"] == 2
        pipeline.acknowledges = True


# ---------------------------------------------------------------- metrics


def test_what_happens_is_counted_by_state_reason_and_time() -> None:
    with running_pipeline(plans_ahead=0) as pipeline:
        pipeline.tokenizer.send(Control(1, ControlAction.PAUSE))
        prompt = list(range(1, 31))
        for number in (1, 2, 3):
            pipeline.tokenizer.send(new_submit(number, prompt, 4, group_id=1, choice=number - 1))
        pipeline.tokenizer.send(new_submit(4, PROMPT, 4, grammar="a+"))
        paused = wait_for(pipeline, "num_requests_waiting", 4)
        assert (paused["paused"], paused["num_requests_held"], paused["num_requests_compiling"]) == (1, 2, 1)
        assert paused["num_requests_running"] == paused["queue_seconds_count"] == 0
        pipeline.tokenizer.send(Control(2, ControlAction.ABORT_GROUP, id_of(4)))
        pipeline.tokenizer.send(Control(3, ControlAction.RESUME))
        pipeline.group.pump(lambda: all(pipeline.finish_of(number) for number in (1, 2, 3)))
        pipeline.group.pump(lambda: not pipeline.worker.rows)
        after = metrics_of(pipeline)
        assert after["paused"] == after["num_requests_waiting"] == after["kv_pages_used"] == 0
        assert after["kv_pages"] == after["kv_pages_free"] + after["kv_pages_cached"]
        assert (after["finished_total,reason=length"], after["finished_total,reason=abort"]) == (3, 0)
        assert after["queue_seconds_count"] == after["prefill_seconds_count"] == 3
        plans = pipeline.gpu_worker.of(StepPlan)
        assert after["step_rows_count"] == after["step_tokens_count"] == len(plans)
        assert after["step_rows_sum"] == sum(len(plan.samples) for plan in plans)
        assert after["step_tokens_sum"] == after["computed_tokens_total"]
        assert after["plan_seconds_count"] >= len(plans)
        assert after["outbox_frames,link=tokenizer"] == after["outbox_frames,link=gpu_worker"] == 0


def test_met_04_after_all_are_aborted_no_gauge_is_stuck() -> None:
    with running_pipeline(worker_card(max_rows=2), plans_ahead=0) as pipeline:
        pipeline.is_working = False
        for number in range(1, 6):
            pipeline.tokenizer.send(new_submit(number, [number, *PROMPT], 9))
        assert wait_for(pipeline, "records", 5)["kv_pages_used"] > 0
        pipeline.tokenizer.send(Control(1, ControlAction.ABORT_ALL))
        pipeline.work_off()
        pipeline.is_working = True
        pipeline.group.pump(lambda: all(pipeline.finish_of(number) is Finish.ABORTED for number in range(1, 6)))
        pipeline.group.pump(lambda: not pipeline.worker.rows)
        after = metrics_of(pipeline)
        gauges = ("num_requests_running", "num_requests_waiting", "num_requests_retracted", "kv_pages_used")
        assert [after[name] for name in gauges] == [0, 0, 0, 0]
        assert after["finished_total,reason=abort"] == 5


def test_counters_never_fall_when_a_worker_leaves() -> None:
    with running_pipeline() as pipeline:
        run_all(pipeline, [new_submit(1, PROMPT, 4)])
        pipeline.group.join(Role.GPU_WORKER, "b", card=worker_card())
        before = wait_for(pipeline, "kv_pages", 128)
        assert (before["output_tokens_total"], before["prompt_tokens_total"]) == (4, 11)
        pipeline.gpu_worker.send(pipeline.gpu_worker.session.goodbye())
        after = wait_for(pipeline, "kv_pages", 64)
        assert all(after[name] >= value for name, value in before.items() if name.endswith("_total"))
