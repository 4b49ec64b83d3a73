"""What an operator asks of a scheduler, over the wire."""

from __future__ import annotations

import pytest

from services.wire.controls import Control, ControlAction, ControlDone
from services.wire.finish import Finish
from services.wire.members import Heartbeat
from services.wire.requests import Admitted, Refused
from services.wire.steps import StepPlan
from tests.unit.scheduler.fake_worker import new_submit, solo_output
from tests.unit.scheduler.scheduler_group import Pipeline, id_of, last_load, run_all, running_pipeline, worker_card

PROMPT = list(range(1, 12))


def done(pipeline: Pipeline, serial: int, action: ControlAction, group_id: bytes = b"") -> int:
    """Asks, waits for the answer, returns what it concerned."""
    pipeline.tokenizer.send(Control(serial, action, group_id))
    pipeline.group.pump(lambda: any(item.serial == serial for item in pipeline.tokenizer.of(ControlDone)))
    return pipeline.tokenizer.of(ControlDone)[-1].count


def num_heartbeats(pipeline: Pipeline) -> int:
    return len(pipeline.tokenizer.of(Heartbeat))


def test_a_flush_frees_what_nobody_uses() -> None:
    with running_pipeline() as pipeline:
        run_all(pipeline, [new_submit(1, PROMPT, 6)])
        assert done(pipeline, 7, ControlAction.FLUSH_CACHE) == 4  # 16 tokens computed, pages of 4
        assert done(pipeline, 8, ControlAction.FLUSH_CACHE) == 0
        run_all(pipeline, [new_submit(2, PROMPT, 2)])
        assert pipeline.answer(2).cached_tokens == 0


def test_during_a_pause_nothing_is_planned_and_everybody_keeps_its_place() -> None:
    with running_pipeline(plans_ahead=0) as pipeline:
        pipeline.is_working = False
        first = new_submit(1, PROMPT, 20)
        pipeline.tokenizer.send(first)
        pipeline.group.pump(lambda: len(pipeline.gpu_worker.of(StepPlan)) == 1)
        assert done(pipeline, 1, ControlAction.PAUSE) == 1
        pipeline.work_off()
        second = new_submit(2, [2, *PROMPT], 5)
        pipeline.tokenizer.send(second)
        pipeline.group.pump(lambda: len(pipeline.tokenizer.of(Admitted)) == 2)
        pipeline.group.pump(lambda: len(pipeline.answer(1).token_ids) == 1)  # of the plan that was out
        heard = num_heartbeats(pipeline)
        pipeline.group.pump(lambda: num_heartbeats(pipeline) > heard + 1)
        assert len(pipeline.gpu_worker.of(StepPlan)) == 1
        assert last_load(pipeline).num_waiting == 1
        pipeline.is_working = True
        assert done(pipeline, 2, ControlAction.RESUME) == 2
        pipeline.group.pump(lambda: bool(pipeline.finish_of(1) and pipeline.finish_of(2)))
        for submit in (first, second):
            answer = pipeline.answers[submit.request_id]
            assert (answer.token_ids, answer.finish) == solo_output(submit, 200)


def test_a_deadline_ends_a_request_during_a_pause_too() -> None:
    with running_pipeline() as pipeline:
        done(pipeline, 1, ControlAction.PAUSE)
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5, deadline_ms=50))
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.TIMEOUT)


def test_a_group_is_ended_without_its_neighbours() -> None:
    with running_pipeline(worker_card(max_rows=8)) as pipeline:
        done(pipeline, 1, ControlAction.PAUSE)
        for number in (1, 2, 3):
            pipeline.tokenizer.send(new_submit(number, PROMPT, 5, group_id=1, choice=number - 1))
        pipeline.tokenizer.send(new_submit(4, PROMPT, 5))
        assert done(pipeline, 2, ControlAction.ABORT_GROUP, id_of(1)) == 3
        assert done(pipeline, 3, ControlAction.ABORT_GROUP, id_of(1)) == 0
        pipeline.group.pump(lambda: all(pipeline.finish_of(number) is Finish.ABORTED for number in (1, 2, 3)))
        done(pipeline, 4, ControlAction.RESUME)
        pipeline.group.pump(lambda: pipeline.finish_of(4) is Finish.LENGTH)


def test_all_are_ended_and_who_was_not_admitted_is_refused() -> None:
    with running_pipeline() as pipeline:
        done(pipeline, 1, ControlAction.PAUSE)
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5))
        pipeline.tokenizer.send(new_submit(2, PROMPT, 5, grammar="a+"))
        assert done(pipeline, 2, ControlAction.ABORT_ALL) == 2
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.ABORTED)
        (refused,) = pipeline.tokenizer.of(Refused)
        assert (refused.request_id, refused.status, refused.code) == (id_of(2), 503, "aborted")


def test_a_stop_ends_a_pause_so_that_what_is_open_can_end_by_itself() -> None:
    with running_pipeline() as pipeline:
        done(pipeline, 1, ControlAction.PAUSE)
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5))
        pipeline.group.pump(lambda: bool(pipeline.tokenizer.of(Admitted)))
        pipeline.group.stop()
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.LENGTH)


@pytest.mark.parametrize("action", list(ControlAction))
def test_an_idle_scheduler_does_each_of_them(action: ControlAction) -> None:
    with running_pipeline() as pipeline:
        assert done(pipeline, 1, action, id_of(1)) == 0
