"""Tokenway beside llama-server and transformers: the same prompts on the same machine, in turn (A B A B), as ratios.

    python -m bench.peers --llama-server DIR/bin/llama-server --gguf Q4_0.gguf Q4_1.gguf Q8_0.gguf
        [--model smollm2:135m] [--rounds 5] [--threads 2] [--transformers] [--only NUMBER ...] [--out FILE]

All servers answer over HTTP on this machine, each with as many threads as it is told, and llama-server with as many
slots as there are streams. Each round runs every server once, one after the other, each with prompts that no run before
it had; what is printed is the median of the rounds and, of the best of llama-server's files, the median of the ratios
within a round. Prompts are random token ids; every answer must have exactly the tokens that were asked for.
`--transformers` adds its `generate` in float32 to the workloads with a rate, as one batch after the other and without
HTTP; it reads the demo's GGUF file too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.own_server import OwnServer
from bench.provenance import provenance
from services.launcher.bench.report import Report
from services.launcher.bench.runner import Pace, run_sessions
from services.launcher.bench.sessions import RequestForm
from services.launcher.bench.summary import markdown_table
from services.launcher.bench.workloads import Lengths, Workload
from services.launcher.errors import CommandError
from services.launcher.http.client import Client
from services.launcher.http.server_address import ServerAddress
from services.launcher.models import resolve_model
from services.runtime.config import Settings

_IDS = range(1000, 30000)
_START_TIMEOUT_S = 120.0
_TOKENWAY, _TRANSFORMERS = "tokenway", "transformers"

Contender = Callable[["Load", int], float]
"""Runs a workload with prompts of a seed; the figure that counts."""


@dataclass(frozen=True)
class Load:
    """One workload.

    Attributes:
        name: as printed.
        streams: connections that are busy at a time.
        requests: of a round.
        shared: prompt tokens that are the same in all requests.
        prompt: prompt tokens of each request's own.
        output: tokens of each answer.
        figure: which figure counts: `output_tokens_per_s` (more is better) or `ttft` (median ms, less is better).
    """

    name: str
    streams: int
    requests: int
    shared: int
    prompt: int
    output: int
    figure: str = "output_tokens_per_s"

    @property
    def tokens_of_a_slot(self) -> int:
        """What one request takes of a context, with room to spare."""
        return self.shared + self.prompt + self.output + 64

    def figure_of(self, report: Report) -> float:
        """The figure of a run."""
        return report.ttft.median_ms if self.figure == "ttft" else report.output_tokens_per_s


LOADS = (
    Load("1 stream, 128 + 128", 1, 2, 0, 128, 128),
    Load("16 streams, 256 + 128", 16, 32, 0, 256, 128),
    Load("32 streams, 128 + 128", 32, 64, 0, 128, 128),
    Load("8 at a time, 32 requests that share 1,024 tokens, + 32 + 32", 8, 32, 1024, 32, 32),
    Load("first token of 2,048", 1, 2, 0, 2048, 1, "ttft"),
)


@contextlib.contextmanager
def llama_server(program: Path, gguf: Path, threads: int, load: Load) -> Iterator[str]:
    """A running llama-server and its address; as many slots as streams.

    Raises:
        CommandError: it ended, or was not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = load.streams * load.tokens_of_a_slot
    words = ["-m", gguf, "-np", load.streams, "-t", threads, "-c", context, "--port", port, "--host", "127.0.0.1"]
    process = subprocess.Popen([program, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(CommandError, OSError):
            Client(ServerAddress.parse(url)).first_model()
            return
        if process.poll() is not None:
            raise CommandError(f"llama-server ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise CommandError(f"llama-server is not ready after {_START_TIMEOUT_S:.0f} s")
        time.sleep(0.2)


def workload_of(load: Load, seed: int) -> Workload:
    """The prompts of a round."""
    return Workload(Lengths(load.prompt, load.output), seed, _IDS, load.shared)


def over_http(url: str) -> Contender:
    """A server; a run follows one request that does not count. A wrong answer is a CommandError."""
    address = ServerAddress.parse(url)
    form = RequestForm(Client(address).first_model(), is_chat=False)

    def run(load: Load, seed: int) -> float:
        warm_up = Workload(Lengths(16, 4), seed, _IDS).session(0)
        asyncio.run(run_sessions(address, form, [warm_up], Pace(1)))
        workload = workload_of(load, seed)
        sessions = [workload.session(number) for number in range(load.requests)]
        report = Report.of(*asyncio.run(run_sessions(address, form, sessions, Pace(load.streams))))
        if report.failures:
            raise CommandError(f"{load.name}: {next(iter(report.failures))}")
        return load.figure_of(report)

    return run


def of_transformers(gguf: Path, threads: int) -> Contender:
    """The library's own `generate` in this process."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

    def run(load: Load, seed: int) -> float:
        workload = workload_of(load, seed)
        began = time.perf_counter()
        for first in range(0, load.requests, load.streams):
            numbers = range(first, first + load.streams)
            ids = torch.tensor([list(workload.session(number).turns[0].prompt) for number in numbers])
            lengths = {"max_new_tokens": load.output, "min_new_tokens": load.output}
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)
        return load.requests * load.output / (time.perf_counter() - began)

    return run


def measure(load: Load, options: argparse.Namespace) -> dict[str, list[float]]:
    """The figure of each round by name. All servers of a workload run side by side and are asked one at a time."""
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        flags = ["--num-threads", str(options.threads), "--max-running-requests", "64"]
        contenders = {_TOKENWAY: over_http(stack.enter_context(OwnServer(options.model, flags)).url)}
        for gguf in options.gguf:
            url = stack.enter_context(llama_server(options.llama_server, gguf, options.threads, load))
            contenders[gguf.name] = over_http(url)
        if options.transformers and load.figure != "ttft":
            path = resolve_model(options.model, Settings()).path
            contenders[_TRANSFORMERS] = of_transformers(Path(path), options.threads)
        generator = random.Random(options.seed)
        for round_ in range(options.rounds):
            order = list(contenders) if round_ % 2 == 0 else list(reversed(contenders))
            for name in order:
                figure = contenders[name](load, generator.getrandbits(31))
                found.setdefault(name, []).append(figure)
                print(f"{load.name}, round {round_ + 1}: {name} {figure:.1f}", file=sys.stderr, flush=True)
    return found


def best_peer(load: Load, found: dict[str, list[float]]) -> str:
    """Of llama-server's files the one with the best median."""
    peers = [name for name in found if name not in (_TOKENWAY, _TRANSFORMERS)]
    better = min if load.figure == "ttft" else max
    return better(peers, key=lambda name: statistics.median(found[name]))


def summary(load: Load, found: dict[str, list[float]]) -> list[str]:
    """A line of the table."""
    peer = best_peer(load, found)
    ratios = [ours / theirs for ours, theirs in zip(found[_TOKENWAY], found[peer], strict=True)]
    medians = {name: statistics.median(values) for name, values in found.items()}
    others = ", ".join(f"{name} {median:.1f}" for name, median in medians.items() if name != _TOKENWAY)
    unit = "ms to the first token" if load.figure == "ttft" else "output tok/s"
    return [load.name, unit, f"{medians[_TOKENWAY]:.1f}", others, f"{statistics.median(ratios):.2f} ({peer})"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; status 1 when an answer was wrong or a server did not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, nargs="+", required=True, help="files of the same model for llama-server")
    parser.add_argument("--model", default="smollm2:135m", help="what Tokenway serves")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--only", type=int, nargs="+", choices=range(len(LOADS)), help="workloads by number")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args(arguments)
    source = provenance()
    results: dict[str, dict[str, list[float]]] = {}
    rows = []
    try:
        for number in options.only or range(len(LOADS)):
            load = LOADS[number]
            results[load.name] = measure(load, options)
            rows.append(summary(load, results[load.name]))
    except (CommandError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(markdown_table(["workload", "figure", "tokenway", "the others", "ratio to llama-server's best"], rows))
    if options.out is not None:
        loads = {load.name: asdict(load) for load in LOADS if load.name in results}
        content = {**source, "rounds": options.rounds, "threads": options.threads, "loads": loads, "figures": results}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
