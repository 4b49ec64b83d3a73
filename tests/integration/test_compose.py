"""The containers for real: built, scaled while they serve, drained one by one. Needs a Docker engine."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1200)]

_ROOT = Path(__file__).parents[2]
_PROJECT = "tokenway-test"
_FILES = ("compose.yaml", "tests/integration/compose.test.yaml")
_READY_TIMEOUT_S = 300
_NUM_REQUESTS = 300
_NUM_AT_ONCE = 8
_EXPECTED = {
    "1, 2, 3, 4,": " 5, 6, 7",
    "hello world hello world hello world hello world hello": " world hello world hello",
}


@dataclass
class Stack:
    """The running project, reached through its proxy."""

    port: int
    environment: dict[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str, files: Sequence[str] = _FILES) -> str:
        """Runs docker-compose and returns what it prints."""
        named = [word for file in files for word in ("-f", file)]
        return _run(["docker-compose", "-p", _PROJECT, *named, *arguments], self.environment)

    def containers(self, service: str) -> list[str]:
        """The ids of a service's running containers, oldest first."""
        label = f"label=com.docker.compose.service={service}"
        project = f"label=com.docker.compose.project={_PROJECT}"
        return _run(["docker", "ps", "-q", "--no-trunc", "--filter", label, "--filter", project]).split()[::-1]

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET; 0 when the proxy does not listen."""
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
                connection.request("GET", path)
                response = connection.getresponse()
                return response.status, response.read().decode()
        except OSError:
            return 0, ""

    def wait_ready(self) -> None:
        """Asks until the proxy has a tokenizer that is ready."""
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while self.get("/ready")[0] != 200:
            assert time.monotonic() < deadline_s, self.compose("logs", "--no-color", "--tail", "40")
            select.select([], [], [], 0.2)  # nothing tells when: asked five times a second

    def complete(self, number: int) -> str:
        """One request, every other one streamed; "" when it went as it should, else what went wrong."""
        prompt = list(_EXPECTED)[number % len(_EXPECTED)]
        is_streamed = number % 4 < 2
        body = {"model": "smollm2:135m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": is_streamed}
        if prompt != "1, 2, 3, 4,":
            body["max_tokens"] = 4
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                answer = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return f"{number}: {error!r}"
        try:
            text = _streamed_text(answer) if is_streamed else json.loads(answer)["choices"][0]["text"]
        except (ValueError, KeyError, IndexError):
            return f"{number}: {response.status} {answer}"
        return "" if (response.status, text) == (200, _EXPECTED[prompt]) else f"{number}: {response.status} {answer}"

    def tokenizers_that_completed(self) -> int:
        """How many of the tokenizers that run now have answered a completion."""
        families = text_string_to_metric_families(self.get("/metrics")[1])
        samples = [sample for family in families for sample in family.samples if sample.name.endswith("requests_total")]
        return len({s.labels["instance"] for s in samples if s.labels.get("route") == "/v1/completions" and s.value})


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        command, cwd=_ROOT, env=os.environ | (environment or {}), capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def _streamed_text(answer: str) -> str:
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    if events[-1] != "[DONE]":
        raise ValueError("the stream was cut")
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Three tokenizers and two detokenizers on a free port, ready; removed with their volumes afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stack = Stack(port, {"PORT": str(port)})
    stack.compose("down", "--volumes", "--remove-orphans")
    try:
        stack.compose("build")
        stack.compose("up", "--detach", "--scale", "tokenizer=3", "--scale", "detokenizer=2")
        stack.wait_ready()
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans")


def test_the_configuration_is_valid_with_and_without_a_gpu() -> None:
    stack = Stack(0)
    stack.compose("config", "--quiet", files=["compose.yaml"])
    stack.compose("config", "--quiet", files=["compose.yaml", "compose.gpu.yaml"])


def test_300_requests_succeed_while_processes_are_added_and_drained(stack: Stack) -> None:
    progress = threading.Semaphore(0)

    def complete(number: int) -> str:
        failure = stack.complete(number)
        progress.release()
        return failure

    def wait_for(count: int) -> None:
        for _ in range(count):
            assert progress.acquire(timeout=120), "the requests have come to a stop"

    with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        answers = [pool.submit(complete, number) for number in range(_NUM_REQUESTS)]
        wait_for(50)
        leaving = [stack.containers("tokenizer")[0], stack.containers("detokenizer")[0]]
        stack.compose("up", "--detach", "--no-recreate", "--scale", "tokenizer=4", "--scale", "detokenizer=3")
        assert len(stack.containers("tokenizer")) == 4
        wait_for(100)
        for container in leaving:
            _run(["docker", "kill", "--signal", "TERM", container])
        statuses = [_run(["docker", "wait", container]).strip() for container in leaving]
        num_left = sum(not answer.done() for answer in answers)
        failures = [failure for answer in answers if (failure := answer.result())]
    assert failures == []
    assert statuses == ["0", "0"]  # each ended by itself, drained
    assert num_left > 0, "all requests were over before the two had drained"
    assert (len(stack.containers("tokenizer")), len(stack.containers("detokenizer"))) == (3, 2)
    assert stack.tokenizers_that_completed() == 3  # the one that was added among them
    assert stack.get("/ready")[0] == 200


def test_sse_14_the_proxy_passes_each_event_on_as_it_comes(stack: Stack) -> None:
    body = {"model": "smollm2:135m", "prompt": "1, 2, 3, 4,", "max_tokens": 600, "ignore_eos": True, "stream": True}
    with closing(http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.getheader("content-type", "").startswith("text/event-stream")
        assert response.getheader("content-length") is None
        assert len(response.read1(65536)) < 2000  # one event or two, not a buffer full of them


def test_only_the_proxy_s_port_is_published(stack: Stack) -> None:
    ports = _run(["docker", "ps", "--filter", f"label=com.docker.compose.project={_PROJECT}", "--format", "{{.Ports}}"])
    assert [line for line in ports.splitlines() if "->" in line] == [f"127.0.0.1:{stack.port}->8000/tcp"]


@pytest.mark.parametrize("service", ["scheduler", "gpu_worker", "tokenizer", "detokenizer"])
def test_a_role_runs_without_privileges_and_holds_torch_only_where_it_is_needed(stack: Stack, service: str) -> None:
    inside = ["docker", "exec", stack.containers(service)[0]]
    script = """if True:
        import importlib.util, os
        print(os.getuid(), os.access("/", os.W_OK), os.access("/app", os.W_OK))
        print(importlib.util.find_spec("torch") is not None)
    """
    assert _run([*inside, "python", "-c", script]).split() == ["10001", "False", "False", str(service == "gpu_worker")]
    assert _run([*inside, "python", "-m", "services.runtime.health", "/run/tokenway"]) == "healthy\n"
