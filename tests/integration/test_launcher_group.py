"""The real group under the launcher: how it starts, how it ends, and what it leaves behind (nothing)."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.integration.server import Server, running, start, wait_ready

pytestmark = pytest.mark.timeout(240)

_SETTINGS = {"kv_cache_tokens": 8192, "num_threads": 1}
_QUICK = {**_SETTINGS, "numerics": "fast"}  # loads and answers sooner
_LONG = {"prompt": "1, 2, 3, 4,", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the servers of this test make their run directories: somewhere short, because paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="tw-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory)


def _connect(server: Server, timeout_s: float = 120) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=timeout_s)


def _get(server: Server, path: str) -> int:
    """The status of a GET; 0 when nobody listens."""
    try:
        with closing(_connect(server, 10)) as connection:
            connection.request("GET", path)
            return connection.getresponse().status
    except OSError:
        return 0


@dataclass
class Completion:
    """A completion under way in a thread: what came, when it began, how it ended."""

    server: Server
    body: dict[str, object]
    status: int = 0
    text: str = ""
    events: list[str] = field(default_factory=list)
    error: Exception | None = None
    has_begun: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        connection = _connect(self.server)
        try:
            connection.request("POST", "/v1/completions", json.dumps(self.body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            self.status = response.status
            for line in response:
                self.text += line.decode()
                if line.startswith(b"data: "):
                    self.events.append(line.decode()[6:].strip())
                    self.has_begun.set()
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        finally:
            self.has_begun.set()
            connection.close()

    def finish(self, timeout_s: float) -> None:
        """Waits for its end."""
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the client hangs"


def _stream(server: Server, **changes: object) -> Completion:
    completion = Completion(server, _LONG | {"model": _model(server), "stream": True} | changes)
    completion.has_begun.wait(60)
    assert completion.events, completion.text or completion.error
    return completion


def _model(server: Server) -> str:
    with closing(_connect(server)) as connection:
        connection.request("GET", "/v1/models")
        name: str = json.loads(connection.getresponse().read())["data"][0]["id"]
    return name


def _child(server: Server, role: str) -> psutil.Process:
    children = psutil.Process(server.process.pid).children()
    return next(child for child in children if child.cmdline()[-1] == f"services.{role}")


def _family(server: Server) -> list[psutil.Process]:
    launcher = psutil.Process(server.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def _assert_gone(family: list[psutil.Process], timeout_s: float) -> None:
    psutil.wait_procs(family, timeout=timeout_s)
    alive = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert alive == []


def _assert_nothing_left(server: Server, runtime_directory: Path) -> None:
    assert list(runtime_directory.iterdir()) == []
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as any server does
        listener.bind(("127.0.0.1", urlsplit(server.url).port))


def _finish(server: Server, timeout_s: float) -> int:
    status = server.process.wait(timeout_s)
    if server.process.stdout is not None:
        with suppress(ValueError):
            server.process.stdout.close()
    return status


def test_prc_03_ctrl_c_with_open_streams_ends_everything_within_5_s_and_leaves_nothing(
    smollm2_path: Path, runtime_directory: Path
) -> None:
    with running(smollm2_path, num_tokenizers=2, num_detokenizers=2, **_QUICK) as server:
        family = _family(server)
        assert len(family) == 7
        streams = [_stream(server) for _ in range(4)]
        assert server.stop(signal.SIGINT, timeout_s=5) == 130
        _assert_gone(family, 1)
        _assert_nothing_left(server, runtime_directory)
        for stream in streams:
            stream.finish(1)
            assert "error" in json.loads(stream.events[-2]), stream.events[-3:]


def test_prc_10_nobody_is_served_before_the_server_is_ready_and_everybody_after(
    smollm2_path: Path, runtime_directory: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = start(smollm2_path, port=port, **_QUICK)
    server.url = f"http://127.0.0.1:{port}"
    seen: set[tuple[int, int]] = set()
    is_ready = threading.Event()

    def poll() -> None:
        while not is_ready.wait(0.05):
            seen.add((_get(server, "/health"), is_ready.is_set()))

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        wait_ready(server)
        is_ready.set()
        poller.join()
        assert _get(server, "/health") == 200
        assert {status for status, late in seen if not late} <= {0, 503, 200}
        assert 0 in {status for status, _ in seen}
        short = Completion(
            server, {"model": _model(server), "prompt": "1, 2, 3, 4,", "max_tokens": 4, "temperature": 0}
        )
        short.finish(60)
        assert json.loads(short.text)["choices"][0]["text"] == " 5, "
    finally:
        is_ready.set()
        server.process.send_signal(signal.SIGTERM)
        assert _finish(server, 20) == 0
    _assert_nothing_left(server, runtime_directory)


def test_prc_10_a_damaged_model_file_ends_the_start_with_one_line_and_no_child_left(
    smollm2_path: Path, runtime_directory: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.gguf"
    with smollm2_path.open("rb") as whole:
        damaged.write_bytes(whole.read(1_000_000))
    server = start(damaged, **_SETTINGS)
    output, _ = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    reasons = re.findall(r"^tokenway: cannot start: .*", output, re.MULTILINE)
    assert len(set(reasons)) == 1
    assert str(damaged) in reasons[0]
    assert output.splitlines()[-1] == reasons[0]
    assert "Traceback" not in output
    assert "killed" not in output
    assert list(runtime_directory.iterdir()) == []


def test_prc_03_ctrl_c_while_the_model_loads_ends_everything_within_5_s(
    smollm2_path: Path, runtime_directory: Path
) -> None:
    server = start(smollm2_path, **_SETTINGS)
    assert server.process.stdout is not None
    for line in server.process.stdout:
        if "scheduler/0" in line:
            break
    family = _family(server)
    assert len(family) == 5
    server.process.send_signal(signal.SIGINT)
    server.process.communicate(timeout=5)
    assert server.process.returncode == 130
    _assert_gone(family, 1)
    assert list(runtime_directory.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("role", ["scheduler", "gpu_worker", "detokenizer"])
def test_prc_01_a_killed_process_ends_every_request_with_an_error_and_then_the_group(
    smollm2_path: Path, runtime_directory: Path, role: str
) -> None:
    with running(smollm2_path, **_SETTINGS) as server:
        family = _family(server)
        stream = _stream(server)
        whole = Completion(server, _LONG | {"model": _model(server)})
        _child(server, role).kill()
        deadline_s = time.monotonic() + 5
        while _get(server, "/health") == 200:
            assert time.monotonic() < deadline_s
        assert server.process.wait(7) == 1
        stream.finish(1)
        whole.finish(1)
        while not server.lines[-1].startswith(f"tokenway: {role}-0 was killed by SIGKILL"):
            assert time.monotonic() < deadline_s + 10, server.log()  # whoever reads what it printed may be behind
        assert "Traceback" not in server.log()
        assert "error" in json.loads(stream.events[-2]), stream.events[-3:]
        assert stream.events[-1] == "[DONE]"
        assert whole.status >= 500
        assert "error" in json.loads(whole.text)
        _assert_gone(family, 1)
        assert list(runtime_directory.iterdir()) == []


@pytest.mark.slow
def test_prc_03_a_killed_launcher_leaves_no_process_and_its_directory_goes_with_the_next_start(
    smollm2_path: Path, runtime_directory: Path
) -> None:
    with running(smollm2_path, **_SETTINGS) as server:
        family = _family(server)
        server.process.kill()
        _assert_gone(family, 2)
    (left,) = runtime_directory.iterdir()
    with running(smollm2_path, port=urlsplit(server.url).port, **_SETTINGS) as server:
        assert not left.exists()
        assert _get(server, "/health") == 200


@pytest.mark.slow
def test_prc_06_prc_07_a_second_server_is_refused_the_port_and_otherwise_lives_beside_the_first(
    smollm2_path: Path, runtime_directory: Path
) -> None:
    with running(smollm2_path, **_SETTINGS) as first:
        refused = start(smollm2_path, port=urlsplit(first.url).port, **_SETTINGS)
        output, _ = refused.process.communicate(timeout=10)
        assert refused.process.returncode == 2
        assert f"port {urlsplit(first.url).port} on 127.0.0.1 is in use" in output
        with running(smollm2_path, served_model_name="second", **_SETTINGS) as second:
            assert len(list(runtime_directory.iterdir())) == 2
            assert _model(second) == "second"
            assert _model(first) != "second"
            assert _get(first, "/health") == 200


@pytest.mark.slow
def test_prc_07_a_file_that_is_no_socket_stays_where_a_socket_was_wanted(
    smollm2_path: Path, runtime_directory: Path
) -> None:
    run_dir = runtime_directory / "mine"
    run_dir.mkdir(mode=0o700)
    (run_dir / "scheduler.sock").write_text("not a socket")
    server = start(smollm2_path, run_dir=run_dir, **_SETTINGS)
    output, _ = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    assert "scheduler.sock exists and is not a socket" in output
    assert (run_dir / "scheduler.sock").read_text() == "not a socket"


@pytest.mark.slow
def test_sigterm_lets_open_streams_finish_and_takes_no_new_ones(smollm2_path: Path, runtime_directory: Path) -> None:
    with running(smollm2_path, num_tokenizers=2, drain_timeout_s=100, **_SETTINGS) as server:
        streams = [_stream(server, max_tokens=100) for _ in range(4)]
        server.process.send_signal(signal.SIGTERM)
        while _get(server, "/live") != 0:
            assert server.process.poll() is None
        assert not any(stream.events[-1] == "[DONE]" for stream in streams), "too short to show anything"
        assert _finish(server, 100) == 0
        for stream in streams:
            stream.finish(1)
            assert stream.events[-1] == "[DONE]"
            assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
        _assert_nothing_left(server, runtime_directory)


@pytest.mark.slow
def test_sigterm_cuts_what_is_still_open_after_the_drain_time(smollm2_path: Path, runtime_directory: Path) -> None:
    with running(smollm2_path, drain_timeout_s=1, **_SETTINGS) as server:
        stream = _stream(server)
        server.process.send_signal(signal.SIGTERM)
        assert _finish(server, 10) == 0
        stream.finish(1)
        assert "error" in json.loads(stream.events[-2]), stream.events[-3:]
        _assert_nothing_left(server, runtime_directory)
