"""What a process does around its loop: signals, exit statuses, the death of its parent, the addresses that it binds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.runtime.config import Settings
from services.runtime.service import HURRY_SIGNAL, LOSS_SIGNAL, OrphanError, Process, StartError
from services.wire.endpoints import Identity
from services.wire.errors import EndpointInUseError
from services.wire.members import Role
from tests.insistence import insist
from tests.sockets import DEADLINE_S, Sockets, wait_until

STOPPABLE = """
import sys
from services.runtime.service import run_service
from services.wire.members import Role
from services.wire.transport import BlockingReceiver

def main(process):
    receiver = BlockingReceiver([])
    process.on_stop = receiver.interrupt
    print("ready", flush=True)
    while not process.is_stopping:
        receiver.receive_batch(600)
    print("stopping", process.drain_timeout_s, process.has_lost_peer, flush=True)
    sys.stdin.read()

run_service(Role.SCHEDULER, main)
"""
FAILING = """
from services.runtime.service import GroupLostError, OrphanError, StartError, run_service
from services.runtime.session import HandshakeError
from services.wire.errors import EndpointInUseError, ProtocolError
from services.wire.members import Role

def main(process):
    raise {error}

run_service(Role.SCHEDULER, main)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def start() -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a stoppable process and waits until it is ready."""
    processes: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", STOPPABLE, "--drain-timeout-s", "7.5"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert next_line(process) == "ready"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **environment}, check=False
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_noticed_in_the_midst_of_a_wait(
    start: Callable[[], subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = start()
    sent = time.monotonic()
    process.send_signal(number)
    assert next_line(process).startswith("stopping ")
    assert time.monotonic() - sent < 10  # it waits for 600
    process.communicate()
    assert process.returncode == 0


def test_prc_03_ctrl_c_and_the_parents_sigterm_are_one_stop(start: Callable[[], subprocess.Popen[str]]) -> None:
    process = start()
    process.send_signal(signal.SIGINT)
    assert next_line(process).startswith("stopping ")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0


def test_a_second_signal_of_a_kind_ends_the_process_at_once(start: Callable[[], subprocess.Popen[str]]) -> None:
    process = start()
    process.send_signal(signal.SIGTERM)
    assert next_line(process).startswith("stopping ")
    insist(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM


def test_prc_03_what_is_sent_to_all_and_passed_on_by_the_parent_is_one_stop(
    start: Callable[[], subprocess.Popen[str]],
) -> None:
    process = start()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert next_line(process).startswith("stopping ")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGTERM, "7.5 False"), (HURRY_SIGNAL, "0.0 False"), (LOSS_SIGNAL, "0.0 True")]
)
def test_a_stopping_process_drains_unless_it_is_hurried(
    start: Callable[[], subprocess.Popen[str]], number: signal.Signals, said: str
) -> None:
    process = start()
    process.send_signal(number)
    assert next_line(process) == f"stopping {said}"
    process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize("error", ["StartError", "EndpointInUseError", "HandshakeError"])
def test_what_cannot_start_says_so_in_one_line(error: str) -> None:
    result = run(FAILING.format(error=f"{error}('the reason')"))
    assert (result.returncode, result.stderr, result.stdout) == (2, "tokenway scheduler: the reason\n", "")


def test_bad_settings_are_one_line_too() -> None:
    result = run(FAILING.format(error="AssertionError"), TOKENWAY_PRT="1")
    assert (result.returncode, result.stderr) == (
        2, "tokenway scheduler: unknown setting 'prt' in the environment\n",
    )  # fmt: skip


@pytest.mark.parametrize("error", ["ProtocolError", "ValueError"])
def test_a_fault_of_ours_leaves_its_traceback(error: str) -> None:
    result = run(FAILING.format(error=f"{error}('the reason')"))
    assert result.returncode == 1
    assert "E scheduler/" in result.stderr
    assert f"{error}: the reason" in result.stderr


@pytest.mark.parametrize("error", ["GroupLostError", "OrphanError"])
def test_a_process_that_lost_its_group_says_so_in_one_line(error: str) -> None:
    result = run(FAILING.format(error=f"{error}('the reason')"))
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.endswith(" scheduler ends: the reason\n")


def test_prc_03_a_process_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, STOPPABLE], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(next_line(parent)))
    assert next_line(parent) == "ready"
    parent.kill()
    parent.communicate()

    def is_gone() -> bool:
        try:
            child.wait(0.05)
        except psutil.TimeoutExpired:
            return bool(child.status() == psutil.STATUS_ZOMBIE)
        return True

    wait_until(is_gone)


# ---------------------------------------------------------------- addresses


def process_of(role: Role, **settings: str) -> Process:
    return Process(Settings(**settings), Identity(role, "i-1"))  # type: ignore[arg-type]


def test_without_an_endpoint_sockets_lie_in_the_run_directory(made: Sockets) -> None:
    process = process_of(Role.DETOKENIZER, run_dir=str(made.directory))
    assert process.scheduler_endpoint() == f"ipc://{made.directory}/scheduler.sock"
    assert process.peer_endpoint() == f"ipc://{made.directory}/detokenizer-i-1.sock"
    with pytest.raises(StartError, match="--run-dir"):
        process_of(Role.TOKENIZER).scheduler_endpoint()
    made.directory.chmod(0o755)
    with pytest.raises(EndpointInUseError, match="mode 0700"):
        process.scheduler_endpoint()
    made.directory.chmod(0o700)


def test_a_socket_path_is_taken_as_it_is(made: Sockets) -> None:
    process = process_of(Role.TOKENIZER, scheduler_endpoint=f"ipc://{made.directory}/s")
    assert process.scheduler_endpoint() == f"ipc://{made.directory}/s"
    assert process.peer_endpoint() == f"ipc://{made.directory}/tokenizer-i-1.sock"


def test_only_the_scheduler_needs_the_address_behind_a_name() -> None:
    assert (
        process_of(Role.SCHEDULER, scheduler_endpoint="tcp://localhost:5").scheduler_endpoint() == "tcp://127.0.0.1:5"
    )
    assert (
        process_of(Role.TOKENIZER, scheduler_endpoint="tcp://localhost:5").scheduler_endpoint() == "tcp://localhost:5"
    )
    assert process_of(Role.SCHEDULER, scheduler_endpoint="tcp://[::1]:5").scheduler_endpoint() == "tcp://[::1]:5"
    assert process_of(Role.TOKENIZER, scheduler_endpoint="tcp://[::1]:5").scheduler_endpoint() == "tcp://[::1]:5"


def test_peers_bind_a_free_port_on_the_schedulers_network(made: Sockets) -> None:
    endpoint = process_of(Role.TOKENIZER, scheduler_endpoint="tcp://localhost:5").peer_endpoint()
    assert endpoint == "tcp://127.0.0.1:0"
    assert made.router(endpoint).address != endpoint


@pytest.mark.parametrize(
    "endpoint", ["tcp://", "tcp://host", "tcp://host:x", "tcp://host:99999", "host:5", "udp://h:1"]
)
def test_odd_endpoints_are_named(endpoint: str) -> None:
    with pytest.raises(StartError, match="neither ipc://PATH nor tcp://HOST:PORT"):
        process_of(Role.TOKENIZER, scheduler_endpoint=endpoint).scheduler_endpoint()


def test_unknown_hosts_are_named() -> None:
    for role in (Role.SCHEDULER, Role.TOKENIZER):
        with pytest.raises(StartError, match=r"no-such-host\.invalid"):
            process_of(role, scheduler_endpoint="tcp://no-such-host.invalid:5").peer_endpoint()


def test_the_run_directory_may_be_relative(made: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.directory)
    process = process_of(Role.SCHEDULER, run_dir="run")
    assert process.scheduler_endpoint() == f"ipc://{Path.cwd()}/run/scheduler.sock"


def test_orphans_know_it() -> None:
    process = process_of(Role.SCHEDULER)
    assert process.vital_signs() == {}
    process._parent = 0
    with pytest.raises(OrphanError):
        process.vital_signs()
