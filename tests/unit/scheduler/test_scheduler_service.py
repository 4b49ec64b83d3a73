"""The scheduler's process on real sockets: from Submit to tokens, and what happens when peers come, go and die."""

from __future__ import annotations

import time

import pytest

from services.wire.answers import DecodeFailed, DecodeOpen, StopFound
from services.wire.columns import pack_int32
from services.wire.finish import Finish
from services.wire.members import Role, Roster, State, Telemetry, Welcome
from services.wire.requests import Abort, Acknowledge, Admitted, Load, Refused, Resend
from tests.unit.scheduler.fake_worker import new_submit, solo_output
from tests.unit.scheduler.scheduler_group import (
    counter_of,
    id_of,
    last_load,
    run_all,
    running_group,
    running_pipeline,
    worker_card,
)

PROMPT = list(range(1, 12))


@pytest.mark.parametrize("plans_ahead", [0, 1, 4])
def test_twenty_answers_arrive_whole(plans_ahead: int) -> None:
    with running_pipeline(plans_ahead=plans_ahead) as pipeline:
        submits = [new_submit(number, [number, *PROMPT], 20) for number in range(1, 21)]
        run_all(pipeline, submits)
        for submit in submits:
            answer = pipeline.answers[submit.request_id]
            assert (answer.token_ids, answer.finish) == solo_output(submit, 200)
        admitted = [message.request_id for message in pipeline.tokenizer.of(Admitted)]
        assert admitted == [submit.request_id for submit in submits]


def test_a_peer_is_welcomed_and_told_of_the_others() -> None:
    with running_pipeline() as pipeline:
        welcome, roster = pipeline.tokenizer.of(Welcome)[0], pipeline.tokenizer.of(Roster)[-1]
        assert welcome.epoch == pipeline.group.process.identity.epoch
        assert {(member.role, member.state) for member in roster.members} == {
            (Role.TOKENIZER, State.READY),
            (Role.DETOKENIZER, State.READY),
            (Role.GPU_WORKER, State.READY),
        }
        assert all(member.address == "ipc://nowhere" for member in roster.members)


def test_tokenizers_hear_load_and_telemetry() -> None:
    with running_pipeline() as pipeline:
        run_all(pipeline, [new_submit(1, PROMPT, 3)])
        pipeline.group.pump(lambda: bool(pipeline.tokenizer.of(Telemetry)) and bool(last_load(pipeline).idle_ms))
        load = last_load(pipeline)
        assert (load.state, load.num_pages, load.max_total_tokens) == (State.READY, 64, 200)
        roles = {member.role for message in pipeline.tokenizer.of(Telemetry) for member in message.members}
        assert Role.SCHEDULER in roles
        pipeline.group.pump(lambda: counter_of(pipeline, "scheduler_output_tokens") == 3)
        assert counter_of(pipeline, "scheduler_prompt_tokens") == 11


def test_cached_tokens_are_told() -> None:
    with running_pipeline() as pipeline:
        run_all(pipeline, [new_submit(1, PROMPT, 3)])
        run_all(pipeline, [new_submit(2, PROMPT, 3)])
        assert [pipeline.answer(number).cached_tokens for number in (1, 2)] == [0, 8]


def test_sch_07_what_can_never_fit_is_refused_over_the_wire_and_the_next_is_served() -> None:
    with running_pipeline(worker_card(16, 4, max_model_len=8192)) as pipeline:
        pipeline.tokenizer.send(new_submit(1, [1] * 100, 5))
        run_all(pipeline, [new_submit(2, PROMPT, 5)])
        (refused,) = pipeline.tokenizer.of(Refused)
        assert (refused.status, refused.param, refused.retry_after_s) == (400, "prompt", 0)
        assert "KV pool holds 64" in refused.text


def test_a_full_queue_is_a_503_with_retry_after() -> None:
    with running_pipeline(worker_card(max_rows=1), max_queued_requests=2) as pipeline:
        pipeline.is_working = False
        for number in range(1, 6):
            pipeline.tokenizer.send(new_submit(number, PROMPT, 5))
        pipeline.group.pump(lambda: len(pipeline.tokenizer.of(Refused)) + len(pipeline.tokenizer.of(Admitted)) == 5)
        assert {refused.status for refused in pipeline.tokenizer.of(Refused)} == {503}
        assert all(refused.retry_after_s >= 1 for refused in pipeline.tokenizer.of(Refused))
        assert {refused.code for refused in pipeline.tokenizer.of(Refused)} == {"queue_full"}


def test_without_a_worker_requests_are_refused_as_starting() -> None:
    with running_group() as group:
        tokenizer = group.join(Role.TOKENIZER)
        group.join(Role.DETOKENIZER)
        group.pump(lambda: len(tokenizer.session.members) == 2 and bool(tokenizer.of(Load)))
        assert tokenizer.of(Load)[-1].state is State.STARTING
        tokenizer.send(new_submit(1, PROMPT, 5))
        group.pump(lambda: bool(tokenizer.of(Refused)))
        refused = tokenizer.of(Refused)[0]
        assert (refused.status, refused.code, refused.retry_after_s > 0) == (503, "starting", True)


def test_a_worker_that_greets_before_it_has_a_card_gets_its_core_with_the_second_greeting() -> None:
    with running_group() as group:
        tokenizer = group.join(Role.TOKENIZER)
        group.join(Role.DETOKENIZER)
        worker = group.join(Role.GPU_WORKER)
        group.pump(lambda: len(tokenizer.session.members) == 3)
        assert worker.session.is_welcome
        worker.session.worker_card = worker_card()
        group.pump(lambda: any(load.state is State.READY for load in tokenizer.of(Load)))


def test_sse_01_an_abort_ends_the_answer_and_frees_its_pages() -> None:
    with running_pipeline() as pipeline:
        pipeline.is_working = False
        pipeline.tokenizer.send(new_submit(1, PROMPT, 100))
        pipeline.group.pump(lambda: bool(pipeline.worker.results))
        pipeline.tokenizer.send(Abort(id_of(1), pack_int32([0])))
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.ABORTED)
        pipeline.work_off()
        pipeline.group.pump(lambda: last_load(pipeline).free_pages == 64 and last_load(pipeline).num_running == 0)
        assert pipeline.answer(1).token_ids == []


def test_met_04_load_returns_to_zero_when_everything_was_aborted() -> None:
    with running_pipeline(worker_card(max_rows=4)) as pipeline:
        pipeline.is_working = False
        numbers = list(range(1, 31))
        for number in numbers:
            pipeline.tokenizer.send(new_submit(number, [number % 50] * 9, 150))
        pipeline.group.pump(lambda: last_load(pipeline).num_running > 0 and last_load(pipeline).num_waiting > 20)
        pipeline.tokenizer.send(Abort(b"".join(map(id_of, numbers)), pack_int32([0] * 30)))
        pipeline.is_working = True
        pipeline.work_off()
        start_s = time.monotonic()
        pipeline.group.pump(
            lambda: (
                last_load(pipeline).num_running == last_load(pipeline).num_waiting == 0
                and last_load(pipeline).free_pages == 64
            )
        )
        assert time.monotonic() - start_s < 2.0


def test_a_stop_string_ends_an_answer_and_nothing_more_comes() -> None:
    with running_pipeline() as pipeline:
        pipeline.tokenizer.send(new_submit(1, PROMPT, 150))
        pipeline.group.pump(lambda: len(pipeline.answer(1).token_ids) >= 7)
        pipeline.detokenizer.send(StopFound(id_of(1), pack_int32([0]), pack_int32([5])))
        pipeline.group.pump(lambda: last_load(pipeline).num_running == 0 and last_load(pipeline).idle_ms > 0)
        num_ids = len(pipeline.answer(1).token_ids)
        assert num_ids < 150
        run_all(pipeline, [new_submit(2, PROMPT, 3)])
        assert len(pipeline.answer(1).token_ids) == num_ids
        assert pipeline.finish_of(1) is Finish.NONE


def test_a_deadline_ends_an_answer_with_timeout() -> None:
    with running_pipeline() as pipeline:
        pipeline.is_working = False
        pipeline.tokenizer.send(new_submit(1, PROMPT, 50, deadline_ms=50))
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.TIMEOUT)
        pipeline.work_off()


def test_an_answer_that_the_detokenizer_gave_up_is_not_made_any_more() -> None:
    with running_pipeline() as pipeline:
        pipeline.is_working = False
        pipeline.tokenizer.send(new_submit(1, PROMPT, 100))
        pipeline.group.pump(lambda: bool(pipeline.worker.results) and last_load(pipeline).num_running == 1)
        pipeline.detokenizer.send(DecodeFailed(id_of(1), pack_int32([0])))
        pipeline.group.pump(lambda: last_load(pipeline).num_running == 0 and last_load(pipeline).num_pages == 64)
        pipeline.is_working = True
        pipeline.work_off()
        run_all(pipeline, [new_submit(2, PROMPT, 3)])
        assert pipeline.answer(1).token_ids == []


def test_a_gap_is_sent_again_and_a_tokenizer_gets_a_fresh_decoder() -> None:
    with running_pipeline() as pipeline:
        pipeline.acknowledges = False
        submit = new_submit(1, PROMPT, 12)
        run_all(pipeline, [submit])
        whole, _ = solo_output(submit, 200)
        answer = pipeline.answer(1)
        answer.token_ids, answer.finish = whole[:5], Finish.NONE
        pipeline.detokenizer.send(Resend(id_of(1), pack_int32([0]), pack_int32([5])))
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.LENGTH)
        assert pipeline.answer(1).token_ids == whole
        num_opens = len(pipeline.detokenizer.of(DecodeOpen))
        pipeline.answers.clear()
        pipeline.tokenizer.send(Resend(id_of(1), pack_int32([0]), pack_int32([7])))
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.LENGTH)
        assert pipeline.answer(1).token_ids == whole
        assert len(pipeline.detokenizer.of(DecodeOpen)) == num_opens + 1


def test_the_record_goes_when_the_last_id_is_acknowledged() -> None:
    with running_pipeline() as pipeline:
        pipeline.acknowledges = False
        run_all(pipeline, [new_submit(1, PROMPT, 6)])
        pipeline.tokenizer.send(Acknowledge(id_of(1), pack_int32([0]), pack_int32([6])))
        run_all(pipeline, [new_submit(2, PROMPT, 6)])
        pipeline.tokenizer.send(Acknowledge(id_of(2), pack_int32([0]), pack_int32([5])))
        run_all(pipeline, [new_submit(3, PROMPT, 6)])
        assert pipeline.group.service._router.num_records == 2


def test_sch_21_the_same_submit_twice_is_one_answer_and_a_newer_attempt_replaces_the_old() -> None:
    with running_pipeline() as pipeline:
        pipeline.is_working = False
        first = new_submit(1, PROMPT, 6)
        pipeline.tokenizer.send(first)
        pipeline.tokenizer.send(first)
        pipeline.group.pump(lambda: len(pipeline.tokenizer.of(Admitted)) == 2)
        assert pipeline.group.service._router.num_open == 1
        second = new_submit(1, [5, 6, 7], 6, attempt=1)
        pipeline.tokenizer.send(second)
        pipeline.tokenizer.send(first)  # late: nobody waits for the old attempt
        pipeline.group.pump(lambda: len(pipeline.tokenizer.of(Admitted)) == 3)
        assert pipeline.tokenizer.of(Admitted)[-1].attempt == 1
        pipeline.detokenizer.on_message = None
        pipeline.is_working = True
        pipeline.work_off()
        pipeline.group.pump(lambda: not pipeline.group.service._router.num_open)
        record = pipeline.group.service._router.find(id_of(1), 1)
        assert record is not None
        expected, _ = solo_output(second, 200)
        assert record.request.output_bytes(0) == pack_int32(expected)


def test_an_idle_scheduler_uses_no_cpu() -> None:
    with running_pipeline() as pipeline:
        run_all(pipeline, [new_submit(1, PROMPT, 5)])
        turns = pipeline.group.service._group.progress
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        pipeline.group.pump(lambda: time.monotonic() - start_s > 2.0)
        assert pipeline.group.service._group.progress - turns < 40  # heartbeats of three peers, no polling
        assert time.process_time() - start_cpu_s < 1.0
