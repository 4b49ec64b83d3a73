"""How a worker ends: told to, alone, or because it cannot start; also as a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from services.gpu_worker.scheduler_link import SchedulerLostError
from services.runtime import session
from services.runtime.config import Settings
from services.runtime.service import HURRY_SIGNAL, LOSS_SIGNAL, StartError
from services.wire.members import Goodbye, Heartbeat, State
from tests.sockets import Sockets
from tests.unit.gpu_worker.worker_peer import (
    MAX_ROWS,
    PAGE_SIZE,
    POOL_TOKENS,
    ROOT,
    TestScheduler,
    new_requests,
    serving,
    start_process,
    worker_thread,
)


def test_a_silent_scheduler_ends_the_worker(settings: Settings, net: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SILENCE_LIMIT_S", 0.6)
    with serving(settings, net) as (scheduler, worker):
        scheduler.wait_for(Heartbeat, len(scheduler.all_of(Heartbeat)) + 1)
        error = worker.wait_ended()
        assert isinstance(error, SchedulerLostError)
        assert "has said nothing" in str(error)


def test_told_to_stop_it_finishes_what_is_planned_and_says_goodbye(
    settings: Settings, net: Sockets, alone: list[list[int]]
) -> None:
    with serving(settings, net) as (scheduler, worker):
        requests = new_requests()
        writer = scheduler.new_writer()
        scheduler.generate(writer, requests, 1)
        worker.stop()
        scheduler.generate(writer, requests)
        assert [request.output for request in requests] == alone
        scheduler.release(writer, requests)
        assert worker.wait_ended(scheduler) is None
        assert scheduler.wait_for(Goodbye)
        assert State.DRAINING in [beat.state for beat in scheduler.all_of(Heartbeat)]


def test_it_does_not_leave_while_it_holds_an_answer_or_the_scheduler_may_send_it_more(
    settings: Settings, net: Sockets, alone: list[list[int]]
) -> None:
    with serving(settings, net) as (scheduler, worker):
        writer = scheduler.new_writer()
        requests = new_requests()
        scheduler.tell_state(State.READY)
        scheduler.generate(writer, requests, 2)
        worker.stop()
        scheduler.wait_quiet()
        assert not worker.has_ended()  # a step may be late, on a machine that does other things
        scheduler.generate(writer, requests)
        assert [request.output for request in requests] == alone
        scheduler.release(writer, requests)
        scheduler.wait_quiet()
        assert not worker.has_ended()  # what was sent before the scheduler knew may still be under way
        scheduler.tell_state(State.DRAINING)
        assert worker.wait_ended(scheduler) is None
        assert scheduler.wait_for(Goodbye)


def test_a_scheduler_that_leaves_too_sends_nothing_more(settings: Settings, net: Sockets) -> None:
    with serving(settings, net) as (scheduler, worker):
        scheduler.wait_for(Heartbeat, len(scheduler.all_of(Heartbeat)) + 1)  # it knows that it is welcome
        scheduler.tell_state(State.READY)
        worker.stop()
        scheduler.wait_quiet()
        assert not worker.has_ended()
        scheduler.send(Heartbeat(scheduler.epoch, State.DRAINING, 0))
        assert worker.wait_ended() is None


@pytest.mark.parametrize("is_told_before", [True, False])
def test_prc_03_a_scheduler_that_is_gone_keeps_no_worker_whatever_it_holds(
    settings: Settings, net: Sockets, is_told_before: bool
) -> None:
    """Both are told to stop: its last words are lost when the scheduler is the faster, and no row is released."""
    with serving(settings, net) as (scheduler, worker):
        scheduler.tell_state(State.READY)
        scheduler.generate(scheduler.new_writer(), new_requests(), 2)
        if is_told_before:
            worker.stop()
            scheduler.wait_quiet()
            assert not worker.has_ended()
        scheduler.port.close()
        worker.stop()
        assert worker.wait_ended() is None  # not by the scheduler's silence, which is an error


def test_prc_03_told_to_stop_before_it_is_ready_it_ends_at_once(settings: Settings, net: Sockets) -> None:
    with worker_thread(settings) as worker:
        worker.stop()
        assert worker.wait_ended() is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all: no such folder or file"),
        ({"max_model_len": 257}, "256 positions"),
        ({"dp_size": 2, "dp_rank": 2}, "--dp-rank must be less than --dp-size, 2, not 2"),
        ({"kv_cache_tokens": 2**31 - 1}, "--kv-cache-tokens"),
        ({"attention_backend": "triton"}, "--attention-backend triton: it needs a CUDA device"),
        ({"run_dir": ""}, "--scheduler-endpoint or --run-dir"),
    ],
)
def test_prc_10_what_cannot_start_says_why(settings: Settings, change: dict[str, object], words: str) -> None:
    with worker_thread(replace(settings, **change)) as worker:  # type: ignore[arg-type]
        error = worker.wait_ended()
        assert isinstance(error, StartError)
        assert words in str(error)
        assert "\n" not in str(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_prc_10_cuda_without_a_device_says_so(settings: Settings) -> None:
    with worker_thread(replace(settings, device="cuda")) as worker:
        assert "torch finds no CUDA device" in str(worker.wait_ended())


# ---------------------------------------------------------------- as a process


def test_prc_10_a_broken_model_path_ends_the_process_with_status_2_and_one_line(net: Sockets) -> None:
    process = start_process(model="/nowhere/model.gguf", run_dir=net.directory)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors.startswith("tokenway gpu_worker: /nowhere/model.gguf: no such folder or file")
    assert errors.count("\n") == 1


_IMPORT_THAT_STOPS = """
import os, sys
number = int(sys.argv.pop())
from services.gpu_worker.__main__ import main
from services.runtime.service import run_service
from services.wire.members import Role

class Stop:
    def find_spec(self, name, *rest):
        if name == "torch":
            os.kill(os.getpid(), number)
            print("the import went on", flush=True)

sys.meta_path.insert(0, Stop())
run_service(Role.GPU_WORKER, main)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, HURRY_SIGNAL, LOSS_SIGNAL])
def test_prc_03_told_to_stop_in_the_midst_of_an_import_it_ends_at_once(settings: Settings, number: int) -> None:
    command = [sys.executable, "-c", _IMPORT_THAT_STOPS, "--model", settings.model, str(int(number))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_process_serves_and_ends_with_status_0_on_sigterm(settings: Settings, net: Sockets) -> None:
    own = {"model": settings.model, "run_dir": settings.run_dir, "kv_cache_tokens": POOL_TOKENS, "page_size": PAGE_SIZE}
    process = start_process(device="cpu", max_running_requests=MAX_ROWS, num_threads=1, instance="0", **own)
    scheduler = TestScheduler(net)
    scheduler.wait_ready()
    requests, writer = new_requests(), scheduler.new_writer()
    scheduler.generate(writer, requests, 2)
    scheduler.release(writer, requests)
    process.send_signal(signal.SIGTERM)
    scheduler.wait_for(Goodbye)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    for words in ("llama", "weights from", "KV pool", "activations", "attention: PagedCpuAttention", "warm-up"):
        assert words in errors
    assert "Traceback" not in errors
