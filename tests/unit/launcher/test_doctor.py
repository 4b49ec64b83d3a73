"""What the doctor finds on a machine: each check well and unwell, and that it says how to mend what is wrong."""

from __future__ import annotations

import io
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from services.launcher.doctor import machine_checks, place_checks
from services.launcher.doctor.findings import Verdict, as_json, failed, lines_of, ok, warning
from services.launcher.doctor.machine_checks import check_device, check_disk, check_open_files, check_packages
from services.launcher.doctor.place_checks import check_port, check_run_directory, check_running, check_scheduler
from services.launcher.terminal import Terminal
from services.runtime.config import Settings, inherited_environment
from services.runtime.health import Pulse, unhealthy_reason
from services.wire.codec import decode, encode
from services.wire.members import ForeignHello, HandshakeRefused
from services.wire.messages import PROTOCOL_VERSION
from tests.unit.launcher.openai_server import openai_server

CPU = {
    "torch_version": "2.9", "cuda_version": "", "device_name": "", "num_cores": 2, "total_bytes": 8e9,
    "available_bytes": 4e9,
}  # fmt: skip


def test_findings_are_lines_and_json() -> None:
    terminal = Terminal(io.StringIO(), has_color=False)
    assert lines_of(ok("disk", "1 GB\x1b"), terminal) == ["ok       disk               1 GB\ufffd"]
    assert lines_of(failed("port", "taken", "choose another"), terminal) == [
        "failed   port               taken",
        "                            -> choose another",
    ]
    assert as_json([ok("a", "x"), warning("b", "y", "z")]) == {
        "ok": True,
        "checks": [
            {"name": "a", "verdict": "ok", "text": "x", "remedy": ""},
            {"name": "b", "verdict": "warning", "text": "y", "remedy": "z"},
        ],
    }
    assert as_json([failed("c", "w")])["ok"] is False


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_packages().verdict == Verdict.OK
    monkeypatch.setattr(machine_checks, "_PACKAGES", ("json", "no_such_package"))
    found = check_packages()
    assert (found.verdict, found.text) == (Verdict.FAILED, "not installed: no_such_package")
    assert "pip install" in found.remedy


@pytest.mark.parametrize(
    ("limits", "verdict", "remedy"),
    [
        ((1024, 65536), Verdict.WARNING, "ulimit -n 65536, before the start"),
        ((1024, 8192), Verdict.WARNING, "ulimit -n 8192, before the start"),
        ((1024, resource.RLIM_INFINITY), Verdict.WARNING, "ulimit -n 65536, before the start"),
        ((256, 256), Verdict.WARNING, "ulimit -n 65536, as root, or in limits.conf"),
        ((4096, 4096), Verdict.OK, ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), Verdict.OK, ""),
    ],
)
def test_a_low_limit_of_open_files_is_a_warning(
    limits: tuple[int, int], verdict: Verdict, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    found = check_open_files()
    assert (found.verdict, found.remedy) == (verdict, remedy)


def test_room_for_models_is_looked_at_where_they_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    usage = type(shutil.disk_usage("/"))(10**12, 0, 5 * 10**8)

    def disk_usage(place: Path) -> object:
        asked.append(place)
        return usage

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    found = check_disk(tmp_path / "not" / "yet")
    assert asked == [tmp_path]
    assert (found.verdict, found.text) == (Verdict.WARNING, f"500.0 MB free for models in {tmp_path}/not/yet")


def test_the_device_is_told_and_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert [finding.text for finding in check_device(CPU)] == [
        "2 cores; torch 2.9", "4.00 GB of 8.00 GB free", "none: models run on the processor",
    ]  # fmt: skip
    memory = list(check_device({**CPU, "available_bytes": 1e9}))[1]
    assert (memory.name, memory.verdict) == ("memory", Verdict.WARNING)
    gpu = {**CPU, "device_name": "H200", "cuda_version": "13.0"}
    assert [finding.text for finding in check_device(gpu)] == ["H200, 4.00 GB of 8.00 GB free; torch 2.9, CUDA 13.0"]
    assert list(check_device({**CPU, "cuda_version": "13.0"}, wants_gpu=False))[-1].verdict == Verdict.OK


@pytest.mark.parametrize(
    ("script", "cuda", "text"),
    [
        ("exit 9", "", "nvidia-smi is here but finds no working driver"),
        ("true", "", "nvidia-smi is here but finds no working driver"),
        ("echo 'H200, 580.1'", "", "H200, driver 580.1, but torch is a build for the processor"),
        ("echo 'H200, 580.1'", "13.0", "H200, driver 580.1, but torch (for CUDA 13.0) cannot use it"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_a_failure(
    script: str, cuda: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = list(check_device({**CPU, "cuda_version": cuda}))[-1]
    assert (found.name, found.verdict, found.text) == ("gpu", Verdict.FAILED, text)
    assert found.remedy


def test_prc_06_a_port_that_is_taken_is_named_with_who_has_it() -> None:
    with openai_server() as server:
        found = check_port(Settings(port=int(server.url.rsplit(":", 1)[1])))
        assert found.verdict == Verdict.WARNING
        assert "is taken by a server that has model-a, model-b" in found.text
        server.refusal = (401, "no key")
        assert "has models for who has a key" in check_port(Settings(port=int(server.url.rsplit(":", 1)[1]))).text
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        found = check_port(Settings(port=other.getsockname()[1]))
        assert (found.verdict, "is in use by another process" in found.text) == (Verdict.FAILED, True)
        assert "--port" in found.remedy
    assert check_port(Settings(port=0)).verdict == Verdict.OK
    assert check_port(Settings(host="no.such.host.invalid")).verdict == Verdict.FAILED


def test_a_run_directory_must_be_private_and_its_paths_short(tmp_path: Path) -> None:
    assert check_run_directory(Settings()).verdict == Verdict.OK
    private = tmp_path / "r"
    private.mkdir(mode=0o700)
    if len(str(private)) < 70:
        assert check_run_directory(Settings(run_dir=str(private))).verdict == Verdict.OK
    private.chmod(0o755)
    found = check_run_directory(Settings(run_dir=str(private)))
    assert (found.verdict, found.remedy) == (Verdict.FAILED, f"chmod 700 {private}")
    found = check_run_directory(Settings(run_dir=str(tmp_path / ("x" * 120))))
    assert (found.verdict, "too long" in found.text) == (Verdict.FAILED, True)


def test_servers_that_run_are_told_and_those_that_are_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_checks, "run_directories", lambda: [tmp_path])
    [found] = check_running()
    assert (found.verdict, found.text) == (Verdict.WARNING, f"nothing runs in {tmp_path}")
    Pulse(tmp_path, "scheduler-0").beat()
    [found] = check_running()
    assert (found.verdict, found.text) == (Verdict.OK, f"a server with healthy processes in {tmp_path}")


# ---------------------------------------------------------------- the scheduler


@contextmanager
def scheduler_of(version: int) -> Iterator[tuple[str, list[object]]]:
    """Refuses one greeting as a scheduler of this protocol does; what it was sent."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    received: list[object] = []

    def serve() -> None:
        peer, frame = router.recv_multipart()
        received.append(decode(frame))
        router.send_multipart([peer, b"\xc1 of another protocol"])
        router.send_multipart([peer, encode(HandshakeRefused(version, f"the scheduler speaks {version}"))])

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"tcp://127.0.0.1:{port}", received
    thread.join()
    router.close(linger=0)
    context.term()


@pytest.mark.parametrize(
    ("version", "verdict"), [(PROTOCOL_VERSION, Verdict.OK), (PROTOCOL_VERSION + 1, Verdict.FAILED)]
)
def test_a_schedulers_protocol_is_asked_without_joining_it(version: int, verdict: Verdict) -> None:
    with scheduler_of(version) as (endpoint, received):
        found = check_scheduler(endpoint)
    assert found.verdict == (Verdict.OK if version == PROTOCOL_VERSION else Verdict.FAILED)
    assert f"protocol {version}" in found.text
    assert received == [ForeignHello(0)]  # no scheduler of any version takes it for a member


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("tcp://127.0.0.1:1", "Connection refused"),
        ("ipc:///no/such.sock", "No such file or directory"),
        ("http://127.0.0.1:1", "neither ipc://PATH nor tcp://HOST:PORT"),
        ("tcp://host:port", "neither ipc://PATH nor tcp://HOST:PORT"),
    ],
)
def test_a_scheduler_that_cannot_be_reached_is_a_failure(endpoint: str, text: str) -> None:
    found = check_scheduler(endpoint)
    assert (found.verdict, found.text) == (Verdict.FAILED, f"{endpoint}: {text}")


def test_a_port_without_a_scheduler_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_checks, "_ANSWER_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = check_scheduler(f"tcp://127.0.0.1:{other.getsockname()[1]}")
    assert (found.verdict, "no scheduler answered" in found.text) == (Verdict.FAILED, True)


def test_a_real_scheduler_answers_and_has_no_new_member(tmp_path: Path) -> None:
    directory = Path(f"/tmp/scheduler-test-{os.getpid()}")
    directory.mkdir(mode=0o700)
    environment = inherited_environment() | {"TOKENWAY_RUN_DIR": str(directory), "TOKENWAY_INSTANCE": "0"}
    command = [sys.executable, "-m", "services.scheduler"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        deadline_s = time.monotonic() + 30
        while not (directory / "scheduler.sock").exists() or unhealthy_reason(directory, time.monotonic()):
            assert time.monotonic() < deadline_s
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)
        found = check_scheduler(f"ipc://{directory}/scheduler.sock")
        assert (found.verdict, found.text.endswith(f"speaks protocol {PROTOCOL_VERSION}")) == (Verdict.OK, True)
    finally:
        process.terminate()
        assert process.stderr is not None
        log = process.stderr.read()
        process.stderr.close()
        status = process.wait(20)
        shutil.rmtree(directory)
    assert status == 0, log
    assert "joined" not in log
