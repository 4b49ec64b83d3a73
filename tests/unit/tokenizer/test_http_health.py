"""Live, ready, health and metrics: what they promise, and what an idle server does not do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from services.runtime.config import Settings
from services.runtime.service import Process
from services.runtime.session import SILENCE_LIMIT_S
from services.tokenizer.backend_view import BackendView
from services.tokenizer.health import Health
from services.tokenizer.open_request import AnswerSink, OpenRequest
from services.tokenizer.scheduler_link import SchedulerLink
from services.tokenizer.stream_table import StreamTable
from services.wire.columns import unpack_int32
from services.wire.endpoints import Identity
from services.wire.finish import Finish
from services.wire.members import Heartbeat, Member, MemberTelemetry, Role, Roster, State, Telemetry, Welcome
from services.wire.messages import PROTOCOL_VERSION
from services.wire.requests import Admitted, Refused, Submit
from services.wire.samples import pack_samples
from tests.sockets import wait_until
from tests.unit.tokenizer.backend_peers import READY_LOAD, Server, chunk
from tests.unit.tokenizer.http_client import metric, request
from tests.unit.tokenizer.scripts import OK


@pytest.fixture
def idle_server(start_server: Callable[..., Server]) -> Server:
    """A process for which no token came out and whose worker does not move."""
    server = start_server()
    server.backend.forget()
    return server


def test_a_check_on_an_idle_server_makes_one_token_for_all_that_wait(idle_server: Server) -> None:
    backend = idle_server.backend
    with ThreadPoolExecutor(8) as pool:
        checks = [pool.submit(request, idle_server.port, "GET", path) for path in ("/health", "/ready") * 4]
        (probe,) = backend.take_submits()
        assert unpack_int32(probe.prompt_token_ids) == [0]
        assert (probe.max_tokens, probe.cache_root, probe.tenant) == (1, b"probe", "probe")
        wait_until(lambda: metric(idle_server.port, "tokenway:tokenizer_open_http_requests") == 9)
        backend.admit(probe)
        backend.send_text(chunk(probe, 0, [1], 0, "a", Finish.LENGTH))
        assert {check.result().status for check in checks} == {200}
    assert request(idle_server.port, "GET", "/health").status == 200  # a token came out just now
    assert not backend.arrived(Submit)
    assert metric(idle_server.port, "tokenway:tokenizer_health_probes_total") == 1


def test_tokens_of_others_are_a_sign_of_life(idle_server: Server) -> None:
    idle_server.backend.tell_load(idle_ms=1, max_total_tokens=77)
    idle_server.backend.wait_for_load(idle_server.port, 77)
    assert request(idle_server.port, "GET", "/health").status == 200
    assert not idle_server.backend.arrived(Submit)


def test_health_names_the_role_that_is_wrong_and_ready_only_says_no(server: Server) -> None:
    backend = server.backend
    backend.script = OK
    assert request(server.port, "GET", "/health").json() == {
        "status": "ok",
        "roles": {"tokenizer": "ok", "scheduler": "ok", "gpu_worker": "ok", "detokenizer": "ok", "tokens": "ok"},
    }
    for role, state, word in (
        (Role.GPU_WORKER, State.STARTING, "starting"),
        (Role.DETOKENIZER, State.DRAINING, "draining"),
    ):
        backend.tell_state(role, state)
        wait_until(lambda: request(server.port, "GET", "/health").status == 503)
        response = request(server.port, "GET", "/health")
        assert response.json()["roles"][str(role)] == word
        assert response.json()["status"] == "not ready"
        ready = request(server.port, "GET", "/ready")
        assert (ready.status, ready.json()) == (503, {"status": "not ready"})
        assert request(server.port, "GET", "/live").status == 200
        backend.tell_state(role, State.READY)
        wait_until(lambda: request(server.port, "GET", "/health").status == 200)


def test_prc_10_a_process_without_a_scheduler_lives_and_is_not_ready(start_server: Callable[..., Server]) -> None:
    server = start_server(has_scheduler=False)
    assert request(server.port, "GET", "/live").status == 200
    response = request(server.port, "GET", "/health")
    assert (response.status, response.json()["roles"]["scheduler"]) == (503, "not reached")
    refused = request(server.port, "POST", "/v1/completions", {"prompt": "x"})
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "starting", "1")
    server.backend.answers_hello = True
    server.backend.script = OK
    wait_until(lambda: request(server.port, "GET", "/ready").status == 200)
    assert request(server.port, "POST", "/v1/completions", {"prompt": "x"}).status == 200


def test_metrics_answer_for_the_whole_group(server: Server) -> None:
    server.backend.script = OK
    request(server.port, "POST", "/v1/completions", {"prompt": "12345", "n": 2})
    response = request(server.port, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.body.decode().splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(line.startswith("tokenway:") for line in samples)
    assert len({line.rsplit(" ", 1)[0] for line in samples}) == len(samples)
    assert 'tokenway:scheduler_things_total{instance="s",kind="a b",role="scheduler"} 5.0' in samples
    assert metric(server.port, "tokenway:time_to_first_token_seconds_count") > 0


def test_token_counters_agree_with_usage(server: Server) -> None:
    names = ("tokenway:prompt_tokens_total", "tokenway:generation_tokens_total")
    before = [metric(server.port, name) for name in names]
    server.backend.script = OK
    usage = request(server.port, "POST", "/v1/completions", {"prompt": "12345", "n": 2}).json()["usage"]
    after = [metric(server.port, name) for name in names]
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert grown == [usage["prompt_tokens"], usage["completion_tokens"]] == [5, 2]


def test_unknown_paths_make_no_new_series(server: Server) -> None:
    for number in range(5):
        request(server.port, "GET", f"/scan/{number}")
    text = request(server.port, "GET", "/metrics").body.decode()
    assert "/scan/" not in text
    assert 'route="other",status="404"' in text


# ---------------------------------------------------------------- the view, without sockets


def view_at(now_s: float, *roles: Role) -> BackendView:
    process = Process(Settings(), Identity(Role.TOKENIZER, "t"))
    session = process.new_session("")
    session.receive(Welcome(PROTOCOL_VERSION, 1), now_s)
    session.receive(Roster(1, tuple(Member(role, "x", 1, "", State.READY) for role in roles)), now_s)
    view = BackendView(session)
    view.take_load(READY_LOAD, now_s)
    view.take_telemetry(telemetry(*roles), now_s)
    return view


def telemetry(*roles: Role, age_ms: int = 0, progress: int = 0, silence_limit_ms: int = 3000) -> Telemetry:
    return Telemetry(
        tuple(MemberTelemetry(role, "x", 1, State.READY, age_ms, progress, b"", silence_limit_ms) for role in roles)
    )


SHOWN = (Role.TOKENIZER, Role.SCHEDULER, Role.GPU_WORKER, Role.DETOKENIZER)
NEEDED = (Role.GPU_WORKER, Role.DETOKENIZER)


def test_old_heartbeats_and_old_telemetry_are_not_health() -> None:
    view = view_at(100.0, *NEEDED)
    assert set(view.health(100.0).values()) == {"ok"}
    view.take_telemetry(telemetry(*NEEDED, age_ms=2500), 100.0)
    view.session.receive(Heartbeat(1, State.READY, 0), 100.6)
    assert view.health(100.6)["gpu_worker"] == "no heartbeat for 3.1 s"
    view.take_telemetry(telemetry(*NEEDED), 200.0)
    assert view.health(200.0)["scheduler"] == "silent for 99.4 s"


def test_a_pause_is_seen_in_the_schedulers_telemetry() -> None:
    view = view_at(100.0, *NEEDED)
    assert not view.is_paused
    for value in (1.0, 0.0):
        metrics = {"gauge\x1ftokenway:scheduler_paused\x1ftokenway:scheduler_paused": value}
        own = MemberTelemetry(Role.SCHEDULER, "x", 1, State.READY, 0, 0, pack_samples(metrics), 3000)
        view.take_telemetry(Telemetry((own,)), 100.0)
        assert view.is_paused == (value > 0)


def test_a_worker_in_a_long_step_is_healthy_until_the_step_takes_too_long() -> None:
    view = view_at(100.0, *NEEDED)
    view.take_telemetry(telemetry(*NEEDED, age_ms=9000, silence_limit_ms=10_000), 100.0)
    assert view.health(100.9)["gpu_worker"] == "ok"
    assert view.is_step_running(100.9)
    assert view.health(101.1)["gpu_worker"] == "no heartbeat for 10.1 s"
    assert not view.is_step_running(101.1)
    view.take_telemetry(telemetry(*NEEDED), 102.0)
    assert not view.is_step_running(102.0)


def test_a_silent_scheduler_refuses_requests() -> None:
    view = view_at(100.0, *NEEDED)
    assert view.refusal(100.0 + SILENCE_LIMIT_S) is None
    error = view.refusal(100.1 + SILENCE_LIMIT_S)
    assert error is not None
    assert error.status == 503


def test_a_moving_worker_is_a_sign_of_work() -> None:
    view = view_at(100.0, *NEEDED)
    view.take_telemetry(telemetry(*NEEDED), 101.0)
    assert view.last_sign_of_work_s() == float("-inf")
    view.take_telemetry(telemetry(*NEEDED, progress=1), 102.0)
    assert view.last_sign_of_work_s() == 102.0


class TableOnly:
    """The parts of a link that a probe uses, without sockets."""

    def __init__(self, view: BackendView) -> None:
        self.view = view
        self.table = StreamTable()
        self.submits: list[Submit] = []
        self.aborted = asyncio.Event()

    def submit(self, submits: Sequence[Submit], sink: AnswerSink, received_s: float) -> OpenRequest:
        self.submits += submits
        return self.table.open(submits, sink, received_s)

    def close_request(self, opened: OpenRequest) -> None:
        if self.table.close(opened) is not None:
            self.aborted.set()


def test_a_probe_that_is_refused_or_gets_nothing_says_what_is_wrong() -> None:
    async def test() -> None:
        link = TableOnly(view_at(time.monotonic(), *NEEDED))
        health = Health(cast(SchedulerLink, link), probe_limit_s=0.05)
        check = asyncio.create_task(health.check())
        while not link.submits:
            await asyncio.sleep(0)
        link.table.refuse(Refused(link.submits[0].request_id, 0, 503, "queue_full", "the queue is full", "", 0))
        is_ready, verdicts = await check
        assert not is_ready
        assert verdicts["tokens"] == "a probe failed: the queue is full"
        assert not link.aborted.is_set()
        is_ready, verdicts = await health.check()
        assert not is_ready
        assert verdicts["tokens"] == "a probe got no token within 0.1 s"
        assert link.aborted.is_set()
        assert health.num_probes == 2

    asyncio.run(asyncio.wait_for(test(), 10))


def test_a_client_that_leaves_ends_no_probe_that_others_wait_for() -> None:
    async def test() -> None:
        link = TableOnly(view_at(time.monotonic(), *NEEDED))
        health = Health(cast(SchedulerLink, link))
        checks = [asyncio.create_task(health.check()) for _ in range(2)]
        while not link.submits:
            await asyncio.sleep(0)
        checks[0].cancel()
        (submit,) = link.submits
        link.table.admit(Admitted(submit.request_id, 0))
        link.table.take(chunk(submit, 0, [1], 0, "a", Finish.LENGTH), time.monotonic())
        assert await checks[1] == (True, {**dict.fromkeys(map(str, SHOWN), "ok"), "tokens": "ok"})

    asyncio.run(asyncio.wait_for(test(), 10))
