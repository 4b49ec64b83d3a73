"""Who owns a socket path, what lies in the way of a new owner, and how addresses are written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.wire.endpoints import (
    EndpointClaim,
    Identity,
    ipc_endpoint,
    is_ipv6,
    local_address_towards,
    parse_routing_id,
    private_directory,
    tcp_endpoint,
)
from services.wire.errors import EndpointInUseError
from services.wire.members import Goodbye, Role
from services.wire.transport import RouterPort
from tests.sockets import Sockets, messages, receive

HOLDER = """
import os, sys, zmq
from services.wire.transport import RouterPort
port = RouterPort(zmq.Context(), sys.argv[1])
print("bound", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run_dir(made: Sockets) -> Path:
    return made.directory


def start_holder(endpoint: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "bound\n"
    return process


def end(process: subprocess.Popen[str], number: signal.Signals) -> None:
    process.send_signal(number)
    process.communicate()


def assert_messages_pass(made: Sockets, port: RouterPort, epoch: int) -> None:
    dealer = made.dealer(port.address, b"test/%d" % epoch)
    assert dealer.send(Goodbye(epoch))
    assert messages(receive([port, dealer], 1)) == [Goodbye(epoch)]


def test_prc_07_socket_left_by_a_killed_process_does_not_block_the_next(made: Sockets, run_dir: Path) -> None:
    endpoint = ipc_endpoint(run_dir, "scheduler")
    end(start_holder(endpoint), signal.SIGKILL)
    assert (run_dir / "scheduler.sock").is_socket()
    port = made.router(endpoint)
    assert_messages_pass(made, port, 1)
    port.close()
    assert list(run_dir.iterdir()) == []


def test_prc_07_second_bind_is_refused_and_names_the_owner(made: Sockets, run_dir: Path) -> None:
    endpoint = ipc_endpoint(run_dir, "scheduler")
    holder = start_holder(endpoint)
    try:
        with pytest.raises(EndpointInUseError, match=f"{endpoint}.*pid {holder.pid}"):
            made.router(endpoint)
        assert (run_dir / "scheduler.sock").is_socket()
    finally:
        end(holder, signal.SIGKILL)


def test_prc_07_second_bind_in_one_process_is_refused_and_harms_nothing(made: Sockets, run_dir: Path) -> None:
    port = made.router(ipc_endpoint(run_dir, "a"))
    with pytest.raises(EndpointInUseError):
        made.router(ipc_endpoint(run_dir, "a"))
    assert_messages_pass(made, port, 2)
    port.close()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_prc_07_what_is_no_socket_is_left_alone(run_dir: Path, kind: str) -> None:
    path = run_dir / "scheduler.sock"
    target = run_dir / "target"
    target.write_text("data")
    match kind:
        case "file":
            path.write_text("data")
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(target)
    with pytest.raises(EndpointInUseError, match="not a socket"):
        EndpointClaim(f"ipc://{path}")
    assert target.read_text() == "data"
    assert path.is_dir() if kind == "directory" else path.read_text() == "data"
    assert {entry.name for entry in run_dir.iterdir()} == {"scheduler.sock", "target"}


def test_prc_07_two_servers_do_not_hear_each_other(made: Sockets, run_dir: Path) -> None:
    ports = [made.router(ipc_endpoint(private_directory(run_dir / name), "scheduler")) for name in "ab"]
    dealers = [made.dealer(port.address, b"tokenizer/t/1") for port in ports]
    for epoch, dealer in enumerate(dealers):
        dealer.send(Goodbye(epoch))
    received = receive([*ports, *dealers], 2)
    assert {port: envelope.message for port, envelope in received} == {ports[0]: Goodbye(0), ports[1]: Goodbye(1)}


def test_prc_06_tcp_port_in_use_is_refused_and_named(made: Sockets) -> None:
    port = made.router("tcp://127.0.0.1:0")
    assert not port.address.endswith(":0")
    with pytest.raises(EndpointInUseError, match=f"cannot bind {port.address}: Address already in use"):
        made.router(port.address)
    assert_messages_pass(made, port, 3)


def test_ipv6_literals(made: Sockets) -> None:
    if not Path("/proc/net/if_inet6").exists() and sys.platform == "linux":
        pytest.skip("this machine has no IPv6")
    assert tcp_endpoint("::1", 0) == "tcp://[::1]:0"
    assert tcp_endpoint("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert is_ipv6("tcp://[::1]:0")
    assert not is_ipv6("tcp://host:1")
    assert local_address_towards("::1", 5000) == "::1"
    assert_messages_pass(made, made.router("tcp://[::1]:0"), 4)


def test_the_address_towards_a_host() -> None:
    assert local_address_towards("127.0.0.1", 5000) == "127.0.0.1"
    assert local_address_towards("localhost", 5000) == "127.0.0.1"


def test_paths_that_are_too_long_are_refused_before_binding(run_dir: Path) -> None:
    long = private_directory(run_dir / ("d" * 60))
    with pytest.raises(EndpointInUseError, match="shorter run directory"):
        ipc_endpoint(long, "x" * 60)
    with pytest.raises(EndpointInUseError, match="shorter run directory"):
        EndpointClaim(f"ipc://{long}/{'x' * 60}.sock")


def test_directories_that_others_may_enter_are_refused(run_dir: Path) -> None:
    made = private_directory(run_dir / "new" / "deep")
    assert made.stat().st_mode & 0o777 == 0o700
    (run_dir / "open").mkdir()
    (run_dir / "open").chmod(0o755)
    with pytest.raises(EndpointInUseError, match="mode 0700"):
        private_directory(run_dir / "open")
    with pytest.raises(EndpointInUseError, match="mode 0700"):
        EndpointClaim(f"ipc://{run_dir}/open/scheduler.sock")
    (run_dir / "file").write_text("")
    with pytest.raises(EndpointInUseError, match="cannot make"):
        private_directory(run_dir / "file")


def test_relative_directories_become_absolute(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir)
    assert private_directory(Path("r")) == run_dir / "r"


def test_one_of_many_at_once_gets_the_claim(run_dir: Path) -> None:
    endpoint = ipc_endpoint(run_dir, "scheduler")
    for _ in range(20):
        barrier = threading.Barrier(6)
        claims: list[EndpointClaim] = []

        def start(barrier: threading.Barrier = barrier, claims: list[EndpointClaim] = claims) -> None:
            barrier.wait()
            with contextlib.suppress(EndpointInUseError):
                claims.append(EndpointClaim(endpoint))
            barrier.wait()

        threads = [threading.Thread(target=start) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(claims) == 1
        claims[0].close()


def test_a_lock_file_that_its_owner_removes_meanwhile_is_no_lock(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = ipc_endpoint(run_dir, "scheduler")
    real_flock = fcntl.flock
    calls = 0

    def flock_after_the_owner_left(descriptor: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (run_dir / "scheduler.sock.lock").unlink()
        real_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_the_owner_left)
    claim = EndpointClaim(endpoint)
    assert calls == 2
    with pytest.raises(EndpointInUseError):
        EndpointClaim(endpoint)
    claim.close()


def test_a_forked_child_does_not_give_its_parents_claim_away(run_dir: Path) -> None:
    script = """
import os, sys
from services.wire.endpoints import EndpointClaim
claim = EndpointClaim(sys.argv[1])
descriptor = claim.listen()
child = os.fork()
if child == 0:
    claim.close()
    os._exit(0)
os.waitpid(child, 0)
print(sorted(os.listdir(sys.argv[2])))
"""
    command = [sys.executable, "-c", script, ipc_endpoint(run_dir, "scheduler"), str(run_dir)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert listing == "['scheduler.sock', 'scheduler.sock.lock']\n"


def test_a_failed_bind_gives_the_claim_back(made: Sockets, run_dir: Path) -> None:
    with pytest.raises(EndpointInUseError, match="cannot bind"):
        made.router("tcp://203.0.113.1:5000")  # an address of documentation: nobody has it
    run_dir.chmod(0o500)
    try:
        if os.geteuid() != 0:  # root may write anywhere
            with pytest.raises(EndpointInUseError):
                made.router(ipc_endpoint(run_dir, "scheduler"))
    finally:
        run_dir.chmod(0o700)
    made.router(ipc_endpoint(run_dir, "scheduler")).close()


@given(st.sampled_from(Role), st.text(), st.integers(0, 2**64 - 1))
def test_routing_ids_come_back(role: Role, instance: str, epoch: int) -> None:
    identity = Identity(role, instance, epoch)
    assert parse_routing_id(identity.routing_id) == (None if "/" in instance else identity)


@pytest.mark.parametrize(
    "routing_id",
    [b"", b"\x00k\x8bEg", b"tokenizer", b"tokenizer/t", b"tokenizer/t/1", b"router/t/0000000000000001",
     b"tokenizer/t/000000000000000G", b"tokenizer/t/-000000000000001", b"tokenizer/t/0x00000000000001",
     b"tokenizer/t/00000000000000001", b"tokenizer/t/000000000000000A", b"tokenizer/t/1_00000000000000", b"\xff/t/1",
     b"tokenizer/t/10000000000000000"],
)  # fmt: skip
def test_what_is_no_routing_id_of_ours(routing_id: bytes) -> None:
    assert parse_routing_id(routing_id) is None


def test_epochs_differ_between_starts() -> None:
    epochs = {Identity(Role.TOKENIZER, "t").epoch for _ in range(100)}
    assert len(epochs) == 100
    assert all(0 <= epoch < 2**64 for epoch in epochs)
