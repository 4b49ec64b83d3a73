"""Peers of a running scheduler that come, go, die, hang or babble, on real sockets."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from services.scheduler.service import BackendLostError
from services.wire.answers import DecodeOpen, StopFound, TextChunks
from services.wire.columns import pack_int32
from services.wire.errors import EndpointInUseError
from services.wire.finish import Finish
from services.wire.members import Goodbye, HandshakeRefused, Heartbeat, Hello, Role, State
from services.wire.messages import PROTOCOL_VERSION
from services.wire.requests import Abort, Admitted, Refused, Submit
from tests.unit.scheduler.fake_worker import new_submit
from tests.unit.scheduler.scheduler_group import (
    Group,
    counter_of,
    id_of,
    last_load,
    run_all,
    running_group,
    running_pipeline,
    worker_card,
)

PROMPT = list(range(1, 12))


def test_answers_are_spread_over_detokenizers_and_a_draining_one_gets_none() -> None:
    with running_pipeline() as pipeline:
        second = pipeline.group.join(Role.DETOKENIZER, "b")
        second.on_message = pipeline.take_tokens
        pipeline.group.pump(lambda: len(pipeline.tokenizer.session.members) == 4)
        pipeline.is_working = False
        for number in range(1, 5):
            pipeline.tokenizer.send(new_submit(number, PROMPT, 6))
        pipeline.group.pump(lambda: len(pipeline.tokenizer.of(Admitted)) == 4)
        pipeline.group.pump(lambda: len(second.of(DecodeOpen)) == len(pipeline.detokenizer.of(DecodeOpen)) == 2)
        second.session.set_state(State.DRAINING, time.monotonic())
        pipeline.group.pump(
            lambda: any(
                member.state is State.DRAINING
                for member in pipeline.tokenizer.session.members
                if member.instance == "b"
            )
        )
        pipeline.is_working = True
        pipeline.work_off()
        run_all(pipeline, [new_submit(number, PROMPT, 6) for number in (5, 6, 7)])
        pipeline.group.pump(lambda: all(pipeline.finish_of(number) for number in range(1, 5)))
        assert len(second.of(DecodeOpen)) == 2
        second.send(Goodbye(second.identity.epoch))
        pipeline.group.pump(lambda: len(pipeline.tokenizer.session.members) == 3)


def test_a_lost_detokenizer_ends_its_answers_towards_the_client_and_others_go_on() -> None:
    with running_pipeline() as pipeline:
        second = pipeline.group.join(Role.DETOKENIZER, "b")
        pipeline.group.pump(lambda: len(pipeline.tokenizer.session.members) == 4)
        pipeline.is_working = False
        for number in (1, 2):
            pipeline.tokenizer.send(new_submit(number, PROMPT, 60))
        pipeline.group.pump(lambda: bool(second.of(DecodeOpen)) and bool(pipeline.answers))
        lost, kept = second.of(DecodeOpen)[0].request_id, next(iter(pipeline.answers))
        pipeline.group.leave(second)
        pipeline.is_working = True
        pipeline.work_off()
        pipeline.group.pump(lambda: bool(pipeline.answers[kept].finish) and bool(pipeline.tokenizer.of(TextChunks)))
        (chunks,) = pipeline.tokenizer.of(TextChunks)
        assert (chunks.request_ids, chunks.finishes) == (lost, bytes([Finish.BACKEND_LOST]))
        assert pipeline.answers[kept].finish is Finish.LENGTH
        assert pipeline.group.failure is None


def test_sse_01_a_lost_tokenizer_takes_its_requests_along() -> None:
    with running_pipeline() as pipeline:
        other = pipeline.group.join(Role.TOKENIZER, "b")
        pipeline.group.pump(lambda: len(pipeline.tokenizer.session.members) == 4)
        other.send(new_submit(1, PROMPT, 150))
        pipeline.group.pump(lambda: bool(pipeline.answer(1).token_ids))
        other.send(Goodbye(other.identity.epoch))
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.ABORTED)
        run_all(pipeline, [new_submit(2, PROMPT, 5)])
        assert pipeline.finish_of(2) is Finish.LENGTH


def test_prc_01_a_silent_worker_ends_all_answers_and_the_process() -> None:
    with running_pipeline() as pipeline:
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5))
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.LENGTH)
        pipeline.gpu_worker.is_talking = False
        pipeline.group.pump(lambda: pipeline.group.failure is not None)
        assert isinstance(pipeline.group.failure, BackendLostError)
        assert "gpu_worker a is lost (silent" in str(pipeline.group.failure)


def test_prc_01_a_dead_worker_ends_all_answers_and_the_process() -> None:
    with running_pipeline() as pipeline:
        pipeline.is_working = False
        for number in (1, 2):
            pipeline.tokenizer.send(new_submit(number, PROMPT, 50))
        pipeline.group.pump(lambda: bool(pipeline.worker.results) and len(pipeline.answers) == 2)
        pipeline.work_off()
        pipeline.group.leave(pipeline.gpu_worker)
        pipeline.group.pump(lambda: all(pipeline.finish_of(number) for number in (1, 2)))
        assert {pipeline.finish_of(number) for number in (1, 2)} == {Finish.BACKEND_LOST}
        pipeline.group.pump(lambda: pipeline.group.failure is not None)
        assert isinstance(pipeline.group.failure, BackendLostError)


def test_a_result_that_fits_no_plan_ends_the_worker_not_the_protocol() -> None:
    with running_pipeline() as pipeline:
        pipeline.is_working = False
        pipeline.tokenizer.send(new_submit(1, PROMPT, 50))
        pipeline.group.pump(lambda: bool(pipeline.worker.results))
        result = pipeline.worker.results[0]
        pipeline.gpu_worker.send(result)
        pipeline.gpu_worker.send(result)
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.BACKEND_LOST)
        pipeline.group.pump(lambda: pipeline.group.failure is not None)
        assert pipeline.gpu_worker.of(HandshakeRefused) == []


def test_a_worker_started_anew_takes_the_place_of_the_old_one() -> None:
    with running_pipeline() as pipeline:
        pipeline.is_working = False
        pipeline.tokenizer.send(new_submit(1, PROMPT, 50))
        pipeline.group.pump(lambda: bool(pipeline.worker.results))
        successor = pipeline.group.join(Role.GPU_WORKER, "a", worker_card())
        pipeline.group.pump(lambda: successor.session.is_welcome and pipeline.finish_of(1) is Finish.BACKEND_LOST)
        pipeline.gpu_worker.is_talking = False
        assert pipeline.group.failure is None
        pipeline.gpu_worker, pipeline.is_working = successor, True
        pipeline.worker.__post_init__()
        pipeline.worker.rows.clear()
        pipeline.worker.results.clear()
        successor.on_message = pipeline.take_plan
        run_all(pipeline, [new_submit(2, PROMPT, 5)])
        assert pipeline.finish_of(2) is Finish.LENGTH


def test_a_stranger_is_asked_to_greet_and_a_lost_process_is_sent_away() -> None:
    with running_group() as group:
        stranger = group.join(Role.TOKENIZER, "x")
        group.mute(stranger)
        stranger.send(Heartbeat(stranger.identity.epoch, State.READY, 0))
        assert group.hear(stranger, Heartbeat).epoch == group.process.identity.epoch
        old = group.join(Role.TOKENIZER, "y", epoch=1)
        group.pump(lambda: old.session.is_welcome)
        group.mute(old)
        successor = group.join(Role.TOKENIZER, "y", epoch=2)
        group.pump(lambda: [member.epoch for member in successor.session.members] == [2])
        old.send(Heartbeat(1, State.READY, 5))
        assert "declared lost" in group.hear(old, HandshakeRefused).reason
        old.send(Hello(PROTOCOL_VERSION, Role.TOKENIZER, "y", 1, "", State.READY))
        assert "declared lost" in group.hear(old, HandshakeRefused).reason


def test_a_greeting_under_another_name_is_refused() -> None:
    with running_group() as group:
        liar = group.join(Role.TOKENIZER, "x")
        group.mute(liar)
        liar.send(Hello(PROTOCOL_VERSION, Role.TOKENIZER, "y", liar.identity.epoch, "", State.READY))
        assert "another process" in group.hear(liar, HandshakeRefused).reason


def test_a_message_that_a_role_may_not_send_is_dropped_and_the_rest_goes_on() -> None:
    with running_pipeline() as pipeline:
        pipeline.detokenizer.send(new_submit(9, PROMPT, 5))
        pipeline.tokenizer.send(StopFound(id_of(1), pack_int32([0]), pack_int32([5])))
        pipeline.tokenizer.send(Abort(id_of(77), pack_int32([0])))  # unknown: counted, no error
        run_all(pipeline, [new_submit(1, PROMPT, 5)])
        assert pipeline.finish_of(1) is Finish.LENGTH
        pipeline.group.pump(lambda: counter_of(pipeline, "scheduler_dropped_messages") == 2)
        assert counter_of(pipeline, "scheduler_stale_messages") == 1


def test_prc_05_a_fault_in_one_submit_is_a_500_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_pipeline() as pipeline:
        core = next(iter(pipeline.group.service._router.cores.values()))
        submit = core.submit

        def fault(message: Submit, lane: bytes) -> object:
            if message.request_id == id_of(1):
                raise RuntimeError("injected")
            return submit(message, lane)

        monkeypatch.setattr(core, "submit", fault)
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5))
        run_all(pipeline, [new_submit(2, PROMPT, 5)])
        (refused,) = pipeline.tokenizer.of(Refused)
        assert (refused.request_id, refused.status, refused.code) == (id_of(1), 500, "internal_error")
        assert "injected" not in refused.text
        assert pipeline.finish_of(2) is Finish.LENGTH


def test_draining_refuses_what_is_new_and_finishes_what_is_open() -> None:
    with running_pipeline() as pipeline:
        pipeline.is_working = False
        pipeline.tokenizer.send(new_submit(1, PROMPT, 30))
        pipeline.group.pump(lambda: bool(pipeline.worker.results))
        pipeline.group.stop()
        pipeline.group.pump(lambda: last_load(pipeline).state is State.DRAINING)
        pipeline.tokenizer.send(new_submit(2, PROMPT, 30))
        pipeline.group.pump(lambda: bool(pipeline.tokenizer.of(Refused)))
        refused = pipeline.tokenizer.of(Refused)[0]
        assert (refused.status, refused.code, refused.retry_after_s > 0) == (503, "draining", True)
        pipeline.is_working = True
        pipeline.work_off()
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.LENGTH)
        pipeline.group.pump(lambda: not pipeline.group.thread.is_alive())
        assert pipeline.group.failure is None


def test_a_drain_that_takes_too_long_ends_answers_with_an_error() -> None:
    with running_pipeline(drain_timeout_s=0.3) as pipeline:
        pipeline.is_working = False
        pipeline.tokenizer.send(new_submit(1, PROMPT, 30))
        pipeline.group.pump(lambda: bool(pipeline.worker.results))
        pipeline.group.stop()
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.BACKEND_LOST)
        pipeline.group.pump(lambda: not pipeline.group.thread.is_alive())


def test_sizes_that_cannot_work_with_the_settings_are_told_to_the_worker() -> None:
    with running_group(chunked_prefill_size=-1, max_running_requests=4, max_num_batched_tokens=4) as group:
        worker = group.join(Role.GPU_WORKER, card=worker_card())
        group.mute(worker)
        for message in worker.session.messages_due(time.monotonic()):
            worker.send(message)
        assert "--max-num-batched-tokens" in group.hear(worker, HandshakeRefused).reason


def test_prc_07_a_second_scheduler_on_the_same_endpoint_does_not_start() -> None:
    with running_group() as group:
        with pytest.raises(EndpointInUseError):
            Group(Path(group.settings.run_dir))
        assert group.thread.is_alive()
