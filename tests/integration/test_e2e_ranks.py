"""The real model shared by two ranks: the text is that of one process, and a rank that dies takes its group along."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from services.launcher.port import free_ports
from services.wire.members import Role
from tests.integration.client import HELLO, NUM, TEXT, Client
from tests.integration.role_group import running_roles
from tests.integration.server import environment, running

pytestmark = [pytest.mark.slow, pytest.mark.surface, pytest.mark.timeout(900)]

SETTINGS = {"kv_cache_tokens": 2048, "num_threads": 1, "numerics": "exact", "chunked_prefill_size": 64}
PROMPTS = (NUM, HELLO, "The capital of France is")
BODY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
ROLES = ("-m", "services.{role}")
END_TIMEOUT_S = 60.0
_HOST_A, _HOST_B = "10.203.77.1", "10.203.77.2"


@pytest.fixture(scope="module")
def alone(smollm2_path: Path) -> list[str]:
    """What one process answers."""
    with running(smollm2_path, **SETTINGS) as server:
        return texts(Client(server))


def texts(client: Client) -> list[str]:
    """The answers to all prompts, asked at once."""
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda prompt: client.ask(TEXT, prompt=prompt, **BODY).text, PROMPTS))
    client.wait_idle()
    return answers


def ranks_below(pid: int) -> dict[int, psutil.Process]:
    """The ranks among the descendants of a process."""
    found = [each for each in psutil.Process(pid).children(recursive=True) if "services.gpu_worker" in each.cmdline()]
    return {int(each.environ()["RANK"]): each for each in found if "RANK" in each.environ()}


def torchrun(*options: str) -> list[str]:
    """Arguments for Python that start ranks of the worker."""
    return ["-m", "torch.distributed.run", *options, "-m", "services.gpu_worker"]


def test_serve_starts_the_ranks_and_ends_when_one_hangs(smollm2_path: Path, alone: list[str]) -> None:
    with running(smollm2_path, tp_size=2, **SETTINGS) as server:
        assert texts(Client(server)) == alone
        ranks_below(server.process.pid)[1].suspend()  # nothing tells the others but its silence
        assert server.has_ended(END_TIMEOUT_S)
        assert server.process.returncode == 1
    assert "gpu_worker ends: rank 1 has said nothing for 5 s" in server.log()
    assert "gpu_worker-0" in server.lines[-1]
    assert "Traceback" not in server.log()


def test_torchrun_starts_the_ranks_and_all_end_when_one_is_told_to(smollm2_path: Path, alone: list[str]) -> None:
    worker = torchrun("--nproc-per-node", "2", "--master-port", str(*free_ports(1)))
    with running_roles(ROLES, smollm2_path, worker, **SETTINGS) as group:
        client = Client(group)
        assert texts(client) == alone
        agent = group.processes[Role.GPU_WORKER]
        ranks_below(agent.pid)[1].terminate()
        assert agent.wait(END_TIMEOUT_S) == 0
        assert "draining: " in group.log()


def test_two_hosts_by_torchrun(smollm2_path: Path, alone: list[str], two_hosts: str) -> None:
    (port,) = free_ports(1)
    meeting = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", _HOST_A, "--master-port", str(port))
    with (
        worker_on(two_hosts, smollm2_path, torchrun("--node-rank", "1", *meeting)) as other,
        running_roles(ROLES, smollm2_path, torchrun("--node-rank", "0", *meeting), **SETTINGS) as group,
    ):
        client = Client(group)
        assert texts(client) == alone
        next(iter(ranks_below(other.pid).values())).kill()
        agent = group.processes[Role.GPU_WORKER]
        assert agent.wait(END_TIMEOUT_S) != 0
        assert other.wait(END_TIMEOUT_S) != 0
        client.wait_until(lambda: "rank 1 has ended: its connection is closed" in group.log())


@contextmanager
def worker_on(host: str, model: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process on the other host. It has no link to the scheduler there."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, *command],
        env=environment(model=model, instance="other", **SETTINGS),
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(END_TIMEOUT_S)


@pytest.fixture
def two_hosts() -> Iterator[str]:
    """This host, and a network namespace joined to it by a cable, which is its name."""
    name, here, there = "tokenway-b", "tokenway-va", "tokenway-vb"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("address", "add", f"{_HOST_A}/24", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "address", "add", f"{_HOST_B}/24", "dev", there)
        ip("-n", name, "link", "set", there, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "delete", name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
