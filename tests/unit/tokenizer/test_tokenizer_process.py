"""The process: starting, draining, ending, and what it does when others die."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.runtime.config import Settings
from services.runtime.service import HURRY_SIGNAL, LOSS_SIGNAL, Process, StartError
from services.tokenizer.listener import bind_port
from services.tokenizer.service import main
from services.wire.endpoints import Identity
from services.wire.finish import Finish
from services.wire.members import Goodbye, HandshakeRefused, Heartbeat, Hello, Role, State
from services.wire.messages import PROTOCOL_VERSION
from services.wire.requests import Submit
from services.wire.samples import unpack_samples
from tests.insistence import insist
from tests.sockets import wait_until
from tests.unit.tokenizer.backend_peers import ROOT, Server, chunk
from tests.unit.tokenizer.http_client import Connection, EventReader, request, text_of
from tests.unit.tokenizer.scripts import OK

TEXT_PATH = "/v1/completions"


def open_stream(server: Server) -> tuple[Connection, EventReader, Submit]:
    connection = Connection(server.port)
    connection.send("POST", TEXT_PATH, {"prompt": "x", "stream": True})
    (submit,) = server.backend.take_submits()
    server.backend.admit(submit)
    return connection, EventReader(connection), submit


def test_hello_tells_where_chunks_go_and_heartbeats_carry_metrics(server: Server) -> None:
    def find(arrived: object) -> Heartbeat | None:
        return next((item for item in arrived if isinstance(item, Heartbeat) and item.metrics), None)  # type: ignore[attr-defined]

    heartbeat = server.backend.wait_for(find)
    assert heartbeat.state is State.READY
    assert any("tokenway:generation_tokens_total" in key for key in unpack_samples(heartbeat.metrics))
    assert server.backend.hello is not None
    assert server.backend.hello.role is Role.TOKENIZER
    assert server.backend.hello.address.startswith("ipc://")


def test_sigterm_drains_open_requests_finish_and_goodbye_is_said(start_server: Callable[..., Server]) -> None:
    server = start_server()
    backend = server.backend
    connection, reader, submit = open_stream(server)
    with connection, Connection(server.port) as idle:
        idle.send("GET", "/live")
        assert idle.read_response().status == 200
        server.process.send_signal(signal.SIGTERM)
        backend.wait_for_state(State.DRAINING)
        assert idle.is_closed()
        wait_until(lambda: refuses_connections(server.port))
        backend.send_text(chunk(submit, 0, [1], 0, "to the ", Finish.NONE))
        backend.send_text(chunk(submit, 1, [2], 7, "end", Finish.LENGTH))
        assert text_of(reader.rest()) == "to the end"
        assert connection.is_closed()
    backend.wait_for(lambda arrived: any(isinstance(item, Goodbye) for item in arrived) or None)
    assert server.exit_status() == 0
    assert not list(server.run_dir.glob("tokenizer-*.sock"))


def refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except (ConnectionRefusedError, ConnectionResetError):  # the latter: it was in the queue that closed
        return True
    return False


def test_a_drain_that_takes_too_long_ends_streams_with_an_error(start_server: Callable[..., Server]) -> None:
    server = start_server("--drain-timeout-s", "0.3")
    connection, reader, submit = open_stream(server)
    with connection, Connection(server.port) as whole:
        whole.send("POST", TEXT_PATH, {"prompt": "x"})
        (other,) = server.backend.take_submits()
        server.process.send_signal(signal.SIGTERM)
        events = reader.rest()
        assert events[-1]["error"]["code"] == "draining"
        response = whole.read_response()
        assert (response.status, response.error["code"]) == (503, "draining")
        for each in (submit, other):
            server.backend.wait_for_abort(each)
    assert server.exit_status() == 0


@pytest.mark.parametrize(("number", "code"), [(LOSS_SIGNAL, "backend_lost"), (HURRY_SIGNAL, "draining")])
def test_prc_01_clients_are_told_a_death_from_an_interrupt(
    start_server: Callable[..., Server], number: signal.Signals, code: str
) -> None:
    server = start_server()
    connection, reader, submit = open_stream(server)
    body = json.dumps({"prompt": "x"}).encode()
    with connection, Connection(server.port) as whole, Connection(server.port) as late:
        whole.send("POST", TEXT_PATH, {"prompt": "x"})
        (other,) = server.backend.take_submits()
        late.send("POST", TEXT_PATH, body[:3], Content_Length=str(len(body)), Expect="100-continue")
        late.read_until(b"100 Continue\r\n\r\n")  # it is being received
        server.process.send_signal(number)
        events = reader.rest()
        late.sock.sendall(body[3:])
        assert [event["error"]["code"] for event in events] == [code]
        for waiting in (whole, late):
            response = waiting.read_response()
            assert (response.status, response.error["code"], response.headers["retry-after"]) == (503, code, "1")
        for each in (submit, other):
            server.backend.wait_for_abort(each)
    assert not server.backend.arrived(Submit)
    assert server.exit_status() == 0


def test_a_body_that_is_on_its_way_at_sigterm_is_still_taken(start_server: Callable[..., Server]) -> None:
    server = start_server()
    server.backend.script = OK
    body = json.dumps({"prompt": "x"}).encode()
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, body[:3], Content_Length=str(len(body)), Expect="100-continue")
        connection.read_until(b"100 Continue\r\n\r\n")
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses_connections(server.port))
        connection.sock.sendall(body[3:])
        assert connection.read_response().status == 200
        assert connection.is_closed()
    assert server.exit_status() == 0


def test_behind_a_balancer_the_listener_stays_a_moment_while_ready_says_no(start_server: Callable[..., Server]) -> None:
    server = start_server(is_tcp=True)
    server.backend.script = OK
    assert request(server.port, "GET", "/ready").status == 200
    server.process.send_signal(signal.SIGTERM)
    server.backend.wait_for_state(State.DRAINING)
    response = request(server.port, "GET", "/ready")
    assert (response.status, response.headers["connection"]) == (503, "close")
    assert request(server.port, "GET", "/health").json()["roles"]["tokenizer"] == "draining"
    served = request(server.port, "POST", TEXT_PATH, {"prompt": "x"})
    assert (served.status, served.headers["connection"]) == (200, "close")
    assert server.exit_status() == 0


def test_a_second_signal_ends_the_process_at_once(start_server: Callable[..., Server]) -> None:
    server = start_server()
    connection, _, _ = open_stream(server)
    with connection:
        server.process.send_signal(signal.SIGTERM)
        server.backend.wait_for_state(State.DRAINING)
        insist(server.process, signal.SIGTERM)
        assert server.exit_status() == 128 + signal.SIGTERM


def test_prc_01_a_silent_scheduler_ends_every_request_within_five_seconds(start_server: Callable[..., Server]) -> None:
    server = start_server()
    backend = server.backend
    connection, reader, submit = open_stream(server)
    with connection, Connection(server.port) as whole:
        backend.send_text(chunk(submit, 0, [1], 0, "a"))
        assert reader.next_json()["choices"][0]["text"] == "a"
        whole.send("POST", TEXT_PATH, {"prompt": "x"})
        backend.take_submits()
        backend.is_silent = True
        began_s = time.monotonic()
        assert reader.rest()[-1]["error"]["code"] == "backend_lost"
        response = whole.read_response()
        assert (response.status, response.error["code"]) == (503, "backend_lost")
        assert time.monotonic() - began_s < 5
    refused = request(server.port, "POST", TEXT_PATH, {"prompt": "x"})
    assert refused.status == 503
    assert request(server.port, "GET", "/health").status == 503
    backend.is_silent = False
    backend.script = OK
    backend.tell_load()
    wait_until(lambda: request(server.port, "POST", TEXT_PATH, {"prompt": "x"}).status == 200)


def test_prc_01_a_scheduler_started_anew_is_greeted_and_old_requests_end(start_server: Callable[..., Server]) -> None:
    server = start_server()
    backend = server.backend
    connection, reader, _ = open_stream(server)
    with connection:
        backend.forget()
        backend.identity = Identity(Role.SCHEDULER, "s")
        assert reader.rest()[-1]["error"]["code"] == "backend_lost"
    backend.wait_for(lambda arrived: any(isinstance(item, Hello) for item in arrived) or None)
    backend.script = OK
    wait_until(lambda: request(server.port, "POST", TEXT_PATH, {"prompt": "x"}).status == 200)


def test_a_process_that_may_not_join_ends_with_the_reason(start_server: Callable[..., Server]) -> None:
    server = start_server()
    server.backend.send(HandshakeRefused(PROTOCOL_VERSION, "you were declared lost"))
    assert server.exit_status() == 2
    assert "tokenway tokenizer: you were declared lost" in server.lines


def run_tokenizer(run_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.tokenizer", "--run-dir", str(run_dir), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)


def test_prc_06_a_port_in_use_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_tokenizer(tmp_path / "r", "--model", "/does/not/exist.gguf", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr == (
        f"tokenway tokenizer: port {port} on 127.0.0.1 is in use by another process; choose one with --port\n"
    )


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(StartError, match=re.escape(host)):
        bind_port(host, 0)


def test_every_address_of_a_host_gets_the_same_port() -> None:
    sockets = bind_port("", 0)
    try:
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        assert len({sock.family for sock in sockets}) == len(sockets)
    finally:
        for sock in sockets:
            sock.close()


def test_prc_10_a_missing_or_broken_model_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    for model in (tmp_path / "none.gguf", broken):
        settings = Settings(model=str(model), run_dir=str(tmp_path / "r"), port=0)
        with pytest.raises(StartError, match=re.escape(str(model))) as caught:
            main(Process(settings, Identity(Role.TOKENIZER, "t")))
        assert "\n" not in str(caught.value)


def test_two_processes_share_one_port(start_server: Callable[..., Server]) -> None:
    first = start_server("--instance", "first")
    second = start_server("--instance", "second", port=first.port)
    for server in (first, second):
        server.backend.script = OK
    seen: set[str] = set()

    def both_answered() -> bool:
        text = request(first.port, "GET", "/metrics").body.decode()
        seen.add("first" if 'instance="first"' in text else "second")
        return len(seen) == 2

    wait_until(both_answered)
    first.process.send_signal(signal.SIGTERM)
    assert first.exit_status() == 0
    for _ in range(20):
        assert request(first.port, "GET", "/live").status == 200


def test_the_process_never_imports_torch_and_dies_with_its_parent(small_model_path: Path, tmp_path: Path) -> None:
    child = "import os, subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); sys.stdin.read()"
    command = [
        sys.executable,
        "-m",
        "services.tokenizer",
        "--model",
        str(small_model_path),
        "--run-dir",
        str(tmp_path / "r"),
    ]
    parent = subprocess.Popen(
        [sys.executable, "-c", child, *command, "--max-model-len", "64", "--port", "0"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    pid = int(parent.stdout.readline())
    assert "listening" in parent.stderr.readline()
    libraries = Path(f"/proc/{pid}/maps")
    if libraries.exists():
        assert "torch" not in libraries.read_text()
    parent.kill()
    parent.communicate()
    wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")
