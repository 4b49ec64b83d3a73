"""Two workers with the real model behind one scheduler: they join and leave in mid-stream, and no token is lost."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration.client import HELLO, NUM, TEXT, Client, read_stream
from tests.integration.server import STOP_TIMEOUT_S, Server, environment, running

pytestmark = [pytest.mark.slow, pytest.mark.surface, pytest.mark.timeout(600)]

SETTINGS = {"kv_cache_tokens": 4096, "num_threads": 1, "numerics": "exact"}
PROMPTS = (NUM, HELLO, "2, 3, 4, 5,", "a b c d e f g a b c d e f g a b c")
BODY = {"max_tokens": 60, "ignore_eos": True}
_ROUTED = re.compile(r'^tokenway:scheduler_routed_requests_total\{.*worker="([^"]+)"', re.MULTILINE)


def workers(client: Client) -> set[str]:
    """The workers that get requests."""
    return set(_ROUTED.findall(client.request("GET", "/metrics").body.decode()))


def held_rows(client: Client, instance: str) -> float:
    """Answers that a worker is at, as of its last heartbeat."""
    pattern = rf'^tokenway:worker_held_rows\{{.*instance="{instance}".*\}} (\S+)'
    found = re.search(pattern, client.request("GET", "/metrics").body.decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def stream_all(client: Client, leave: Callable[[], None], *busy: str) -> list[str]:
    """The texts of all prompts, streamed at once; `leave` is called when all these workers are at some."""
    with ExitStack() as stack:
        readers = [stack.enter_context(client.open_stream(TEXT, prompt=prompt, **BODY)) for prompt in PROMPTS]
        client.wait_until(lambda: all(held_rows(client, instance) for instance in busy))
        leave()
        return [read_stream(reader).text for reader in readers]


def child(server: Server, instance: str) -> psutil.Process:
    """A worker that the launcher started."""
    children = psutil.Process(server.process.pid).children()
    found = [each for each in children if each.cmdline()[-1] == "services.gpu_worker"]
    return next(each for each in found if each.environ()["TOKENWAY_INSTANCE"] == instance)


@contextmanager
def worker_by_hand(model: Path, directory: str) -> Iterator[subprocess.Popen[bytes]]:
    """One more worker, started as anybody would who knows the run directory."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.launcher", "serve", "--role", "gpu_worker"],
        env=environment(model=model, run_dir=directory, instance="hand", **SETTINGS),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_workers_join_and_leave_in_mid_stream_and_no_token_is_lost(smollm2_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="tw-") as directory,
        running(smollm2_path, run_dir=directory, dp_size=2, **SETTINGS) as server,
    ):
        client = Client(server)
        client.wait_until(lambda: workers(client) == {"0", "1"})
        expected = [client.ask(TEXT, prompt=prompt, **BODY).text for prompt in PROMPTS]
        leaving = child(server, "1")
        assert stream_all(client, leaving.terminate, "0", "1") == expected
        client.wait_until(lambda: workers(client) == {"0"})
        client.wait_until(lambda: "tokenway: gpu_worker-1 has left\n" in server.lines)
        with worker_by_hand(smollm2_path, directory) as process:
            client.wait_until(lambda: workers(client) == {"0", "hand"})
            assert stream_all(client, process.terminate, "0", "hand") == expected
            assert process.wait(STOP_TIMEOUT_S) == 0
        client.wait_until(lambda: workers(client) == {"0"})
        assert client.ask(TEXT, prompt=NUM, **BODY).text == expected[0]
        client.wait_idle()
