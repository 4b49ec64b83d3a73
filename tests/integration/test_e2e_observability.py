"""What a whole server tells of a request: its trace, its spans, its log lines in every process, its metrics."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.launcher.cli import main
from services.runtime.metric_texts import TEXTS
from services.tokenizer.access import tenant_of
from tests.integration.client import HELLO, TEXT
from tests.integration.server import Server, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KEY = "sk-observed-1"
NUM_TOKENS = 8
Json = dict[str, Any]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's run directory, so that the test finds its control sockets."""
    path = tmp_path_factory.mktemp("run")
    path.chmod(0o700)
    return path


@pytest.fixture(scope="module")
def server(smollm2_path: Path, run_dir: Path) -> Iterator[Server]:
    """Two tokenizers with a key, JSON lines, and vLLM's names beside ours."""
    settings = {
        "api_key": KEY, "log_format": "json", "log_requests": "true", "num_tokenizers": 2, "run_dir": run_dir,
        "metric_names": "vllm", "max_model_len": 512,
    }  # fmt: skip
    with running(smollm2_path, **settings) as found:
        yield found


def ask(
    server: Server, method: str, path: str, body: Json | None = None, key: str = KEY
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {**headers, "Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read(), {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()


def complete(server: Server) -> str:
    """One completion; the id that its headers name."""
    body = {"prompt": HELLO, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    status, _, headers = ask(server, "POST", TEXT, body)
    assert status == 200
    return headers["x-request-id"]


def trace_when_complete(server: Server, name: str) -> Json:
    """The trace, once the last reports of the other processes have come."""
    while True:  # each asking waits for an answer; the test has a time limit
        status, content, _ = ask(server, "GET", f"/trace/{name}")
        assert status == 200
        told: Json = json.loads(content)
        hops = {hop["hop"] for hop in told["answers"][0]["hops"]}
        if told["has_ended"] and hops >= {"queue", "prefill", "decode", "detokenize"}:
            return told


def test_a_trace_follows_a_request_through_every_process(server: Server) -> None:
    told = trace_when_complete(server, complete(server))
    assert told["tenant"] == tenant_of(KEY)
    [answer] = told["answers"]
    assert (answer["finish"], answer["output_tokens"]) == ("length", NUM_TOKENS)
    hops = {hop["hop"]: hop for hop in [*told["hops"], *answer["hops"]]}
    assert [hops[name]["role"] for name in ("http", "queue", "detokenize")] == ["tokenizer", "scheduler", "detokenizer"]
    assert hops["decode"]["counters"]["steps"] >= NUM_TOKENS - 1
    assert hops["decode"]["counters"]["pages"] >= 1
    whole_ms = told["duration_ms"]
    assert 0 < hops["prefill"]["work_ms"] < whole_ms
    assert 0 < hops["decode"]["work_ms"] < whole_ms
    assert hops["prefill"]["work_ms"] <= told["ttft_ms"] <= whole_ms
    starts = [hops[name]["start_ms"] for name in ("http", "queue", "prefill", "decode")]
    assert starts == sorted(starts)
    assert starts[-1] < whole_ms


def test_any_control_socket_answers_for_the_group(server: Server, run_dir: Path) -> None:
    name = complete(server)
    sockets = sorted(run_dir.glob("control-*.sock"))
    assert [path.name for path in sockets] == ["control-0.sock", "control-1.sock"]
    for path in sockets:
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(path))
            control.sendall(f"GET /trace/{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: control.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["id"] == name.partition("-")[2]


def test_every_line_is_one_json_object_and_the_request_s_own_carries_its_numbers(server: Server) -> None:
    name = complete(server)
    trace_when_complete(server, name)
    entries = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert len(entries) > 5
    for entry in entries:
        assert {"time", "level", "role", "instance", "event"} <= set(entry)
    [own] = [entry for entry in entries if entry.get("request_id") == name.partition("-")[2]]
    assert (own["level"], own["route"], own["status"], own["output_tokens"]) == ("info", TEXT, 200, NUM_TOKENS)
    assert own["ttft_ms"] <= own["duration_ms"]
    assert HELLO not in server.log()
    assert KEY not in server.log()


def test_the_key_is_in_no_command_line_and_no_other_role_s_environment(server: Server) -> None:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue  # it has just ended, or is somebody else's
        if b"services." not in command or str(server.process.pid) != _parent_of(process):
            continue
        assert KEY.encode() not in command
        if b"services.tokenizer" not in command:
            assert KEY.encode() not in environment


def _parent_of(process: Path) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""


def test_metrics_have_their_help_and_every_name(server: Server) -> None:
    trace_when_complete(server, complete(server))
    status, content, _ = ask(server, "GET", "/metrics")
    assert status == 200
    families = list(text_string_to_metric_families(content.decode()))
    ours = {family.name.removeprefix("tokenway:"): family for family in families if family.name.startswith("tokenway:")}
    assert {name: family.documentation for name, family in ours.items()} == dict(TEXTS)
    counts = {
        sample.labels["hop"]: sample.value
        for sample in ours["hop_seconds"].samples
        if sample.name.endswith("_count") and sample.value
    }
    assert set(counts) == {"http", "tokenize", "queue", "prefill", "decode", "detokenize"}
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:request_success"} <= {
        f.name for f in families
    }
    assert ask(server, "GET", "/metrics", key="")[0] == 401


@pytest.mark.surface
def test_top_shows_the_stages_of_the_group(server: Server, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete(server)
    stages: dict[str, Json] = {}
    while not stages.get("output", {}).get("num_tokens") or not stages["decode"]["num_tokens"]:  # until heartbeats tell
        assert main(["top", "--run-dir", str(run_dir), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        stages = {stage["name"]: stage for stage in found["stages"]}
    assert list(stages)[-5:] == ["tokenizer", "prefill", "decode", "sampling", "output"]
    for name in ("prefill", "decode"):
        assert stages[name]["bound"] in ("memory", "compute")
        assert min(stages[name][field] for field in ("seconds", "share", "num_bytes", "num_operations")) > 0
    assert stages["disk → memory"]["num_bytes"] > 90e6
    assert [worker["device"] for worker in found["workers"]] == ["cpu"]
    assert main(["top", "--url", server.url, "--once", "--api-key", KEY]) == 0
    assert "OF LIMIT" in capsys.readouterr().out
    assert main(["top", "--url", server.url, "--api-key", "wrong"]) == 2
    assert "wants a key" in capsys.readouterr().err
