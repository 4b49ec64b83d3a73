"""The commands that ask a server, against the real scheduler, tokenizer and detokenizer; the worker has no model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.pipeline import Group, free_port
from services.runtime.config import Settings, inherited_environment
from tests.sockets import sockets
from tests.unit.tokenizer.http_client import request

pytestmark = [pytest.mark.slow, pytest.mark.surface, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
SMALL = ["--num-prompts", "12", "--input-tokens", "40", "--output-tokens", "10", "--concurrency", "4", "--seed", "5"]


class Servers:
    """A group that serves, and the commands about it."""

    def __init__(self, group: Group, run_dir: Path, model: Path) -> None:
        self.url = group.url
        self.run_dir = run_dir
        self.model = model

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def run(self, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.launcher", *words]
        return subprocess.run(
            command, cwd=REPOSITORY, env=inherited_environment(), input=text, capture_output=True, text=True,
            timeout=90, check=False,
        )  # fmt: skip

    def bench(self, *words: str) -> dict[str, Any]:
        """The figures of a run in which every answer was good."""
        out = self.run_dir / "bench.json"
        done = self.run("bench", "--url", self.url, "--out", str(out), *words)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        found = json.loads(out.read_text(encoding="utf-8"))
        assert isinstance(found, dict)
        assert found["failures"] == {}
        assert f"Total output tokens: {found['output_tokens']:>27}" in done.stdout
        return found


@pytest.fixture(scope="module")
def servers(smollm2_path: Path) -> Iterator[Servers]:
    with sockets() as made:
        settings = Settings(model=str(smollm2_path), run_dir=str(made.directory), port=free_port())
        group = Group(settings, made.directory)
        try:
            group.start_all(1, "--step-ms", "2")
            group.wait_ready()
            yield Servers(group, made.directory, smollm2_path)
        finally:
            group.stop()


@pytest.mark.parametrize("pace", [[], ["--request-rate", "40"]])
def test_a_bench_of_random_prompts_counts_every_token(servers: Servers, pace: list[str]) -> None:
    found = servers.bench(*SMALL, "--seed", str(len(pace)), *pace)
    assert (found["requests"], found["input_tokens"], found["output_tokens"]) == (12, 480, 120)
    assert found["cached_tokens"] == 0
    assert found["output_tokens_per_s"] * found["duration_s"] == pytest.approx(120, rel=0.01)
    assert found["e2e"]["median_ms"] >= found["ttft"]["median_ms"] > 0
    assert found["itl"]["p99_ms"] >= found["itl"]["median_ms"] > 0
    assert found["options"]["workload"] == "random"
    assert "api_key" not in json.dumps(found)


def test_a_shared_prefix_is_found_in_the_cache(servers: Servers) -> None:
    found = servers.bench(*SMALL, "--workload", "shared-prefix", "--prefix-tokens", "64", "--concurrency", "1")
    assert found["input_tokens"] == 12 * (64 + 40)
    assert found["cached_tokens"] == 11 * 64


def test_turns_of_a_conversation_find_the_turns_before_them(servers: Servers) -> None:
    found = servers.bench(*SMALL, "--workload", "multi-turn", "--turns", "3", "--num-prompts", "4")
    assert (found["requests"], found["output_tokens"]) == (12, 120)
    assert found["cached_tokens"] > 0


def test_prompts_of_a_file_are_asked_in_chats_and_as_texts(servers: Servers, tmp_path: Path) -> None:
    lines = [{"prompt": "Hello 世界"}, {"conversations": [{"from": "human", "value": "Why?"}]}, {"prompt": "x y z"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    chats = servers.bench("--workload", "jsonl", "--file", str(path), "--output-tokens", "6")
    texts = servers.bench(
        "--workload", "jsonl", "--file", str(path), "--output-tokens", "6", "--endpoint", "completions"
    )
    assert (chats["requests"], chats["output_tokens"], texts["output_tokens"]) == (3, 18, 18)
    assert chats["input_tokens"] > texts["input_tokens"] > 3  # the template's tokens


def test_answers_that_may_stop_are_held_to_the_most_they_may_have(servers: Servers) -> None:
    found = servers.bench(*SMALL, "--no-ignore-eos", "--endpoint", "chat", "--extra-body", '{"top_k": 5}')
    assert 0 < found["output_tokens"] <= 120


def test_failures_are_counted_by_reason(servers: Servers) -> None:
    path = servers.run_dir / "one_too_long.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": list(range(300, 300 + length))}) for length in (5, 9000, 5)))
    words = ["--workload", "jsonl", "--file", str(path), "--endpoint", "completions", "--output-tokens", "4"]
    done = servers.run("bench", "--url", servers.url, *words)
    assert done.returncode == 1
    assert "Failed requests:                               1" in done.stdout
    assert done.stderr.startswith("tokenway: 1 x status 400: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "nope"], "the warm-up failed: status 404"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--workload", "jsonl"], "belong together"),
        (["--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--token-ids", "5", "5"], "--token-ids must be a range"),
        (["--range-ratio", "1"], "--range-ratio must be between 0 and 1"),
        (["--url", "http://127.0.0.1:1"], "cannot reach http://127.0.0.1:1: Connection refused"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line_with_status_2(
    servers: Servers, words: list[str], reason: str
) -> None:
    done = servers.run("bench", "--url", servers.url, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_server_and_the_models_own_files_render_the_same_prompt(servers: Servers, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    bodies: list[object] = [
        [{"role": "user", "content": "你好 <|im_end|> 🙂"}],
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Wetter?"}], "tools": tools},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}],
         "continue_final_message": True},
    ]  # fmt: skip
    for body in bodies:
        path = tmp_path / "chat.json"
        path.write_text(json.dumps(body), encoding="utf-8")
        served = servers.run("render", str(path), "--url", servers.url, "--json")
        local = servers.run("render", str(path), "--model", str(servers.model), "--json")
        assert (served.returncode, local.returncode) == (0, 0), served.stderr + local.stderr
        wanted = ("text", "token_ids", "token_strs", "count")
        found = [{name: json.loads(done.stdout)[name] for name in wanted} for done in (served, local)]
        assert found[0] == found[1]
        assert found[0]["count"] == len(found[0]["token_ids"]) > 5


def test_a_requests_way_is_told_by_the_run_directory_and_by_the_port(servers: Servers) -> None:
    body = {"prompt": list(range(300, 340)), "max_tokens": 12, "ignore_eos": True}
    request_id = request(servers.port, "POST", "/v1/completions", body).headers["x-request-id"]
    for place in (["--run-dir", str(servers.run_dir)], ["--url", servers.url]):
        done = servers.run("trace", request_id, *place)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].startswith(f"{request_id.removeprefix('cmpl-')}: /v1/completions, status 200, ")
        assert "prompt 40 tokens, 0 of them cached; 12 tokens out; length" in lines
        hops = [line.split()[0] for line in lines[lines.index(next(line for line in lines if "HOP" in line)) + 1 :]]
        assert hops[:4] == ["http", "tokenize", "queue", "prefill"]
        assert {"decode", "detokenize"} <= set(hops)
    unknown = servers.run("trace", "chatcmpl-" + "0" * 32, "--run-dir", str(servers.run_dir))
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "status 404" in unknown.stderr
    assert len(unknown.stderr.splitlines()) == 1


def test_the_doctor_sees_the_server_that_runs(servers: Servers) -> None:
    done = servers.run(
        "doctor", str(servers.model), "--json", "--port", str(servers.port), "--kv-cache-tokens", "16384",
        "--scheduler-endpoint", f"ipc://{servers.run_dir}/scheduler.sock",
    )  # fmt: skip
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert (done.returncode, checks["port"]["verdict"], checks["scheduler"]["verdict"]) == (0, "warning", "ok")
    assert "is taken by a server that has SmolLM2-135M-Instruct.Q4_1" in checks["port"]["text"]
