"""What the processes around the model cost: processor time per output token of each, with a model that costs nothing.

    python -m bench.pipeline [--streams 256] [--step-ms 25] [--output-tokens 400] [--tokenizers 1] [--detokenizers 1]

Starts the real scheduler, tokenizer and detokenizer processes with a fake worker (`bench.fake_worker`) whose steps take
a set time, and a client process (`bench.pipeline_client`) with all streams at once, each token an event of its own.
Says what each process spent per token while all streams ran, whether the worker's pace was kept, and TTFT and ITL.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from bench.provenance import provenance
from services.launcher.bench.summary import markdown_table
from services.launcher.errors import ModelNotFoundError
from services.launcher.models import resolve_model
from services.runtime.config import Settings, inherited_environment

_REPOSITORY = Path(__file__).parents[1]
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0


class PipelineError(Exception):
    """The measurement could not be made; the message says why."""


class Group:
    """The processes under test. Their output goes to files in the run directory."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []

    @property
    def url(self) -> str:
        """Where the tokenizers listen."""
        return f"http://127.0.0.1:{self._settings.port}"

    @property
    def process_ids(self) -> dict[str, int]:
        """By the name that each was started under."""
        return {name: process.pid for name, process in self._processes.items()}

    def start_all(self, num_detokenizers: int, *worker_arguments: str, num_workers: int = 1) -> None:
        """Starts the scheduler, fake workers with these arguments, detokenizers, and as many tokenizers as are set."""
        self._start("scheduler", "services.scheduler")
        for number in range(num_workers):
            self._start(_numbered("worker", number), "bench.fake_worker", *worker_arguments)
        for number in range(num_detokenizers):
            self._start(_numbered("detokenizer", number), "services.detokenizer")
        for number in range(self._settings.num_tokenizers):
            self._start(_numbered("tokenizer", number), "services.tokenizer")

    def _start(self, name: str, module: str, *arguments: str) -> None:
        environment = inherited_environment() | self._settings.as_environment() | {"TOKENWAY_INSTANCE": name}
        log = (self._directory / f"{name}.log").open("wb")
        self._logs.append(log)
        command = [sys.executable, "-m", module, *arguments]
        self._processes[name] = subprocess.Popen(
            command, env=environment, cwd=_REPOSITORY, stdout=log, stderr=subprocess.STDOUT
        )

    def wait_ready(self) -> None:
        """Returns when the group serves; PipelineError when one ends or it takes too long."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise PipelineError(f"{name} ended with status {process.returncode}:\n{self._last_lines(name)}")
            if time.monotonic() > deadline_s:
                raise PipelineError(f"the group was not ready within {_START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends all, the tokenizers first."""
        try:
            for process in reversed(self._processes.values()):
                process.terminate()
                process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise PipelineError("a process did not end when told to") from error
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()
            for log in self._logs:
                log.close()

    def _is_ready(self) -> bool:
        """Whether requests are served, and every detokenizer is among those that any tokenizer's metrics tell of."""
        try:
            with (
                urllib.request.urlopen(f"{self.url}/ready", timeout=10),
                urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer,
            ):
                metrics = answer.read().decode()
        except OSError:  # urllib's errors of connections and of statuses are ones
            return False
        return all(f'instance="{name}"' in metrics for name in self._processes if name.startswith("detokenizer"))

    def _last_lines(self, name: str) -> str:
        text = (self._directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-5:])


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Starts the group, lets the client run, ends the group; what client and worker report."""
    model = str(resolve_model(options.model, Settings()).path)
    settings = Settings(
        model=model,
        run_dir=str(directory),
        port=free_port(),
        num_tokenizers=options.tokenizers,
        max_running_requests=options.streams,
        max_queued_requests=options.streams,
        log_level="warning",
    )
    worker_report = directory / "worker.json"
    group = Group(settings, directory)
    try:
        group.start_all(options.detokenizers, "--step-ms", str(options.step_ms), "--report", str(worker_report))
        group.wait_ready()
        report = _run_client(options, settings.model, group)
    finally:
        group.stop()
    return report | {"worker": json.loads(worker_report.read_text(encoding="utf-8"))}


def _run_client(options: argparse.Namespace, model: str, group: Group) -> dict[str, Any]:
    watch = [f"{name}={process_id}" for name, process_id in group.process_ids.items()]
    command = [
        sys.executable, "-m", "bench.pipeline_client", "--url", group.url,
        "--model", model, "--streams", str(options.streams), "--prompt-tokens", str(options.prompt_tokens),
        "--output-tokens", str(options.output_tokens), "--watch", *watch,
    ]  # fmt: skip
    result = subprocess.run(command, cwd=_REPOSITORY, stdout=subprocess.PIPE, check=False)
    if not result.stdout:
        raise PipelineError(f"the client ended with status {result.returncode}")
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else f"{name}-{number + 1}"


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def tables(report: Mapping[str, Any]) -> str:
    """The report for people."""
    worker = report["worker"]
    per_token: Mapping[str, float] = report["cpu_us_per_token"]
    roles = ("scheduler", "detokenizer", "tokenizer", "worker", "client")
    sums = {role: sum(us for name, us in per_token.items() if name.split("-")[0] == role) for role in roles}
    costs = [
        [f"{role} (not Tokenway)" if role in ("worker", "client") else role, f"{sums[role]:.1f}"] for role in roles
    ]
    facts = [
        ["streams", str(report["streams"])],
        ["tokens in the window", f"{report['window_tokens']} in {report['window_s']} s"],
        ["tokens that shared an event", str(report["tokens"] - report["events"])],
        ["failed / wrong text", f"{report['num_failed']} / {report['num_wrong_texts']}"],
        ["step period ms (mean / median / p99)", _times(worker["period"])],
        ["results late by ms", _times(worker["late"])],
        ["TTFT ms", _times(report["ttft"])],
        ["ITL ms", _times(report["itl"])],
    ]
    return "\n\n".join([markdown_table(["process", "CPU us / token"], costs), markdown_table(["what", "value"], facts)])


def _times(times: Mapping[str, float]) -> str:
    return f"{times['mean_ms']:.1f} / {times['median_ms']:.1f} / {times['p99_ms']:.1f}"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description="Processor time per token.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--tokenizers", type=int, default=1)
    parser.add_argument("--detokenizers", type=int, default=1)
    parser.add_argument("--model", default="smollm2:135m", help="whose vocabulary is used (default: the demo model's)")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    options = parser.parse_args(arguments)
    if min(options.streams, options.prompt_tokens, options.tokenizers, options.detokenizers) < 1:
        parser.error("counts must be at least 1")
    if options.output_tokens < 2 or options.step_ms <= 0:
        parser.error("--output-tokens must be at least 2 and --step-ms more than 0")
    return options


def main(arguments: Sequence[str]) -> int:
    """Measures, prints, writes; the exit status."""
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="tw") as directory:
        try:
            report = measure(options, Path(directory))
        except (PipelineError, ModelNotFoundError) as error:
            print(error, file=sys.stderr)
            return 1
    print(tables(report))
    for failure in report["failures"]:
        print(failure, file=sys.stderr)
    if options.out is not None:
        options.out.write_text(json.dumps({**provenance(), **report}, indent=2) + "\n", encoding="utf-8")
    return 1 if report["num_failed"] or report["num_wrong_texts"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
