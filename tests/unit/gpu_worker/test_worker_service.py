"""The worker service on real sockets, with a tiny random model, under a scheduler that the test plays."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from services.gpu_worker import service
from services.gpu_worker import start_up as ready
from services.gpu_worker.attention.paged_cpu import reads_halves
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.parallel.group import RankGroup
from services.gpu_worker.plan_check import PlanError
from services.gpu_worker.start_stages import StartStages
from services.gpu_worker.start_up import ReadyWorker
from services.gpu_worker.step_inputs import StepInputs
from services.runtime import session
from services.runtime.config import Settings
from services.runtime.session import HandshakeError
from services.wire.columns import unpack_int32
from services.wire.finish import Finish
from services.wire.members import HandshakeRefused, Heartbeat, Hello, State
from services.wire.messages import PROTOCOL_VERSION
from services.wire.requests import Abort
from services.wire.samples import unpack_samples
from services.wire.steps import StepResult
from tests.sockets import Sockets
from tests.unit.gpu_worker.plan_writer import Request
from tests.unit.gpu_worker.worker_peer import (
    MAX_ROWS,
    PAGE_SIZE,
    POOL_TOKENS,
    SHAPE,
    TestScheduler,
    new_requests,
    serving,
    worker_thread,
)

# ---------------------------------------------------------------- joining


@pytest.fixture
def has_welcomed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The worker starts to load only once this is set; it greets until then."""
    event = threading.Event()
    start_up = ready.start_up

    def start_late(
        settings: Settings, pump: Callable[[], None], group: RankGroup | None, stages: StartStages
    ) -> ReadyWorker:
        while not event.wait(0.01):
            pump()
        return start_up(settings, pump, group, stages)

    monkeypatch.setattr(service, "start_up", start_late)
    return event


def test_it_greets_at_once_and_shows_its_card_when_the_model_is_ready(
    settings: Settings, net: Sockets, has_welcomed: threading.Event
) -> None:
    scheduler = TestScheduler(net)
    with worker_thread(settings):
        first = scheduler.wait_for(Hello)[0]
        assert (first.state, first.worker, first.address) == (State.STARTING, None, "")
        has_welcomed.set()
        hello = scheduler.wait_ready()
        assert hello.state == State.READY
        card = hello.worker
        assert card is not None
        assert (card.vocab_size, card.logits_width) == (120, 120)
        assert (card.page_size, card.num_pages, card.max_rows) == (PAGE_SIZE, POOL_TOKENS // PAGE_SIZE, MAX_ROWS)
        assert card.max_model_len == 256
        assert card.chunk_tokens == 64
        assert card.chunk_ms > 0


def test_heartbeats_go_out_while_weights_load(
    settings: Settings, net: Sockets, has_welcomed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each report of progress that finds a heartbeat due sends it; here every one does."""
    monkeypatch.setattr(session, "HEARTBEAT_INTERVAL_S", 0.0)
    monkeypatch.setattr("services.gpu_worker.scheduler_link._PUMP_INTERVAL_S", 0.0)
    scheduler = TestScheduler(net)
    with worker_thread(settings):
        beats = scheduler.wait_for(Heartbeat)
        has_welcomed.set()
        scheduler.wait_ready()
        assert len([beat for beat in scheduler.all_of(Heartbeat) if beat.state == State.STARTING]) > len(beats) + 10
        assert all(hello.worker is None for hello in scheduler.all_of(Hello) if hello.state == State.STARTING)


def test_a_scheduler_that_refuses_ends_the_worker(settings: Settings, net: Sockets) -> None:
    scheduler = TestScheduler(net)
    scheduler.welcomes = False
    with worker_thread(settings) as worker:
        scheduler.wait_for(Hello)
        scheduler.send(HandshakeRefused(PROTOCOL_VERSION, "not today"))
        assert isinstance(worker.wait_ended(scheduler), HandshakeError)


# ---------------------------------------------------------------- steps


def test_requests_together_get_the_tokens_that_they_get_alone(
    settings: Settings, net: Sockets, alone: list[list[int]]
) -> None:
    with serving(settings, net) as (scheduler, _):
        requests = new_requests()
        scheduler.generate(scheduler.new_writer(), requests)
        assert [request.output for request in requests] == alone


def test_plans_sent_ahead_are_run_in_order_and_each_is_answered(
    settings: Settings, net: Sockets, alone: list[list[int]]
) -> None:
    with serving(settings, net) as (scheduler, _):
        writer, requests = scheduler.new_writer(), new_requests()
        scheduler.send(writer.plan(*((request, 3) for request in requests)))
        for _ in range(4):
            scheduler.send(writer.plan(*((request, 1) for request in requests)))
        results = scheduler.wait_for(StepResult, 5)
        assert [result.step for result in results] == list(range(5))
        for result in results:
            writer.take(result)
        assert [request.output for request in requests] == alone


def test_a_result_is_not_held_back_until_the_next_plan(settings: Settings, net: Sockets) -> None:
    with serving(settings, net) as (scheduler, _):
        result = scheduler.run(scheduler.new_writer().plan((Request(1, [5, 6]), 2)))
        assert (result.epoch, result.step) == (scheduler.epoch, 0)
        assert unpack_int32(result.counts) == [1]
        assert 0 < result.forward_us <= result.step_us


def test_smp_02_a_nan_row_fails_alone_and_its_neighbours_go_on(
    settings: Settings, net: Sockets, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = ModelRunner.hidden

    def poisoned(self: ModelRunner, inputs: StepInputs) -> torch.Tensor:
        hidden = compute(self, inputs)
        if inputs.num_rows == 4 and inputs.num_tokens == 4:
            hidden[1] = float("nan")
        return hidden

    monkeypatch.setattr(ModelRunner, "hidden", poisoned)
    with serving(settings, net) as (scheduler, _):
        writer, requests = scheduler.new_writer(), new_requests()
        writer.take(scheduler.run(writer.plan(*((request, 3) for request in requests))))
        writer.take(scheduler.run(writer.plan(*((request, 1) for request in requests))))
        assert [request.finish for request in requests] == [
            Finish.NONE,
            Finish.NUMERICAL_ERROR,
            Finish.NONE,
            Finish.NONE,
        ]
        writer.release(requests[1])
        scheduler.generate(writer, [requests[0], requests[2], requests[3]])
        assert [requests[n].output for n in (0, 2, 3)] == [alone[n] for n in (0, 2, 3)]


def test_counts_travel_in_heartbeats(settings: Settings, net: Sockets) -> None:
    with serving(settings, net) as (scheduler, _):
        scheduler.generate(scheduler.new_writer(), new_requests())
        count = len(scheduler.all_of(Heartbeat))
        beat = scheduler.wait_for(Heartbeat, count + 2)[-1]
        found = {key.split("\x1f")[2]: value for key, value in unpack_samples(beat.metrics).items()}
        assert beat.progress == 5
        assert found["tokenway:worker_steps_total"] == 5
        assert found["tokenway:worker_computed_tokens_total"] == 4 * 3 + 4 * 4
        assert found["tokenway:worker_sampled_tokens_total"] == 20
        assert found["tokenway:worker_held_rows"] == 4
        assert found["tokenway:worker_kv_write_bytes_total"] == (
            28 * 2 * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * (2 if reads_halves(SHAPE.head_dim) else 4)
        )
        assert found["tokenway:worker_step_seconds_count"] == 5
        of_stages = {
            tuple(key.split("\x1f")[2:]): value
            for key, value in unpack_samples(beat.metrics).items()
            if "stage=" in key
        }
        for stage, num_steps, num_tokens in (("prefill", 1, 12), ("decode", 4, 16)):
            assert of_stages["tokenway:worker_stage_steps_total", f"stage={stage}"] == num_steps
            assert of_stages["tokenway:worker_stage_tokens_total", f"stage={stage}"] == num_tokens
            assert of_stages["tokenway:worker_stage_bytes_total", f"stage={stage}"] > 0
            limit_s = [of_stages["tokenway:worker_stage_limit_seconds_total", f"stage={stage}", f"bound={bound}"]
                       for bound in ("memory", "compute")]  # fmt: skip
            assert 0 < sum(limit_s) < of_stages["tokenway:worker_stage_seconds_total", f"stage={stage}"]
        assert of_stages["tokenway:worker_stage_seconds_total", "stage=sampling"] > 0
        assert of_stages["tokenway:worker_load_bytes", "stage=disk"] > 10_000
        start_s = {key[1]: value for key, value in of_stages.items() if key[0] == "tokenway:worker_start_seconds"}
        measured = {f"stage={stage}" for stage in ("libraries", "weights", "forms", "limits", "warm_up", "recording")}
        assert start_s.keys() - {"stage=compile"} == measured
        assert min(start_s.values()) > 0
        assert any("worker_machine" in key and "device=cpu" in key for key in unpack_samples(beat.metrics))


# ---------------------------------------------------------------- what it does not take


def test_prc_05_garbage_and_foreign_messages_are_dropped_and_it_goes_on(
    settings: Settings, net: Sockets, alone: list[list[int]]
) -> None:
    with serving(settings, net) as (scheduler, _):
        writer, requests = scheduler.new_writer(), new_requests()
        for junk in (b"", b"\xc1", b"\x91\x28", os.urandom(50)):
            scheduler.port.socket.send_multipart([scheduler.worker, junk])
        scheduler.send(Abort(b"", b""))
        other = replace(writer.plan(), epoch=scheduler.epoch + 1)
        scheduler.send(other)
        writer.next_step = 0
        scheduler.generate(writer, requests)
        scheduler.send(replace(writer.plan(), step=0))
        writer.next_step -= 1
        more = Request(9, [1, 2])
        scheduler.generate(writer, [more], 1)
        assert [request.output for request in requests] == alone
        count = len(scheduler.all_of(Heartbeat))
        beat = scheduler.wait_for(Heartbeat, count + 2)[-1]
        assert [value for key, value in unpack_samples(beat.metrics).items() if "refused_messages" in key] == [7]


def test_a_lost_plan_ends_the_process_and_says_which(settings: Settings, net: Sockets) -> None:
    with serving(settings, net) as (scheduler, worker):
        scheduler.send(replace(scheduler.new_writer().plan(), step=3))
        error = worker.wait_ended(scheduler)
        assert isinstance(error, PlanError)
        assert "step 3 came instead of step 0" in str(error)


def test_a_plan_for_a_row_that_nobody_holds_ends_the_process(settings: Settings, net: Sockets) -> None:
    with serving(settings, net) as (scheduler, worker):
        plan = scheduler.new_writer().plan((Request(1, [5]), 1))
        scheduler.send(replace(plan, new_rows=()))
        assert isinstance(worker.wait_ended(scheduler), PlanError)


def test_a_scheduler_started_anew_is_greeted_and_starts_from_step_0(
    settings: Settings, net: Sockets, alone: list[list[int]]
) -> None:
    with serving(settings, net) as (scheduler, _):
        scheduler.generate(scheduler.new_writer(), new_requests(), 2)
        count = len(scheduler.all_of(Hello))
        scheduler.epoch += 1
        hello = scheduler.wait_for(Hello, count + 1)[-1]
        assert hello.worker is not None
        requests = new_requests()
        scheduler.generate(scheduler.new_writer(), requests)
        assert [request.output for request in requests] == alone
