"""Two workers by prefix and in turn, beside one worker: how much of the prompts is cached, and how much gets done.

    python -m bench.routing [MODEL] [--workers 2] [--prefixes 50] [--rounds 2] [--fake-step-ms MS]

Starts a server for each run: one worker, then rounds of `--routing prefix` and `--routing round_robin` in turn. Each
run sends the same requests, so many at a time: `--per-prefix` for each prefix, in no order. With `--fake-step-ms` the
workers have no model and their steps take a set time (`bench.fake_worker`), so that two need no more cores than one.
Says for each run the share of prompt tokens that came from a cache and the tokens per second, and the two ratios. Ends
with status 1 when an answer is not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.own_server import OwnServer
from bench.pipeline import Group, PipelineError, free_port
from bench.provenance import provenance
from services.launcher.bench.answers import Answer, Expected, read_answer
from services.launcher.bench.summary import markdown_table
from services.launcher.errors import CommandError, ModelNotFoundError
from services.launcher.http.connection import Connection
from services.launcher.models import resolve_model
from services.runtime.config import Settings

_IDS = range(300, 40_000)  # below: control tokens and single bytes
_JOIN_TIMEOUT_S = 300.0
ONE, PREFIX, ROUND_ROBIN = "one worker", "prefix", "round_robin"


@dataclass(frozen=True)
class Workload:
    """What each run sends."""

    num_prefixes: int
    per_prefix: int
    prefix_tokens: int
    own_tokens: int
    output_tokens: int
    concurrency: int

    def prompts(self) -> list[list[int]]:
        """The same for every run."""
        numbers = random.Random(0)
        prefixes = [numbers.choices(_IDS, k=self.prefix_tokens) for _ in range(self.num_prefixes)]
        prompts = [[*prefix, *numbers.choices(_IDS, k=self.own_tokens)] for prefix in prefixes * self.per_prefix]
        numbers.shuffle(prompts)
        return prompts


@dataclass(frozen=True)
class Run:
    """One run. Tokens per second are those of prompts and answers together."""

    name: str
    hit_rate: float
    tokens_per_s: float
    first_token_ms: float
    seconds: float
    failures: list[str]


async def send_all(url: str, workload: Workload) -> list[Answer]:
    """The answers of all prompts, so many at a time."""
    prompts = iter(workload.prompts())
    answers: list[Answer] = []

    async def client() -> None:
        connection = await Connection.open(url)
        for prompt in prompts:
            body = {
                "prompt": prompt, "max_tokens": workload.output_tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            response = await connection.request("POST", "/v1/completions", body)
            answers.append(read_answer(response, Expected(workload.output_tokens, len(prompt))))
        connection.close()

    await asyncio.gather(*(client() for _ in range(workload.concurrency)))
    return answers


def run(name: str, url: str, workload: Workload) -> Run:
    """Sends the workload and sums up."""
    begun_s = time.perf_counter()
    answers = asyncio.run(send_all(url, workload))
    seconds = time.perf_counter() - begun_s
    num_prompt = sum(answer.prompt_tokens for answer in answers)
    return Run(
        name=name,
        hit_rate=sum(answer.cached_tokens for answer in answers) / max(num_prompt, 1),
        tokens_per_s=(num_prompt + sum(answer.output_tokens for answer in answers)) / seconds,
        first_token_ms=1000 * statistics.mean(answer.first_s for answer in answers),
        seconds=seconds,
        failures=[answer.failure for answer in answers if answer.failure],
    )


@contextmanager
def server(options: argparse.Namespace, name: str) -> Iterator[str]:
    """A server with all its workers in the group; its address."""
    num_workers = 1 if name == ONE else options.workers
    routing = ROUND_ROBIN if name == ROUND_ROBIN else PREFIX
    if not options.fake_step_ms:
        flags = ["--dp-size", str(num_workers), "--routing", routing, "--kv-cache-tokens", str(options.kv_cache_tokens)]
        own = OwnServer(options.model, flags)
        try:
            _wait_for_workers(own.url, num_workers)
            yield own.url
        finally:
            own.stop()
        return
    with tempfile.TemporaryDirectory(prefix="tw") as directory:
        settings = Settings(
            model=str(resolve_model(options.model, Settings()).path),
            run_dir=directory,
            port=free_port(),
            routing=routing,
            kv_cache_tokens=options.kv_cache_tokens,
            log_level="warning",
        )
        group = Group(settings, Path(directory))
        try:
            group.start_all(1, "--step-ms", str(options.fake_step_ms), num_workers=num_workers)
            group.wait_ready()
            _wait_for_workers(group.url, num_workers)
            yield group.url
        finally:
            group.stop()


def _wait_for_workers(url: str, count: int) -> None:
    """Returns when the scheduler routes to so many; CommandError when it takes too long."""
    deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        if sum(line.startswith("tokenway:scheduler_routed_requests_total{") for line in lines) >= count:
            return
        time.sleep(0.2)
    raise CommandError(f"{count} workers had not joined after {_JOIN_TIMEOUT_S:.0f} s")


def tables(runs: Sequence[Run]) -> str:
    """The runs, and what they come to."""
    header = ["run", "cached share of prompts", "tokens/s", "mean TTFT ms", "seconds"]
    rows = [
        [each.name, f"{each.hit_rate:.3f}", f"{each.tokens_per_s:.0f}", f"{each.first_token_ms:.0f}",
         f"{each.seconds:.1f}"]
        for each in runs
    ]  # fmt: skip
    hits = {name: statistics.median(each.hit_rate for each in runs if each.name == name) for name in (ONE, PREFIX)}
    rates = {name: [each.tokens_per_s for each in runs if each.name == name] for name in (PREFIX, ROUND_ROBIN)}
    ratios = [one / other for one, other in zip(rates[PREFIX], rates[ROUND_ROBIN], strict=True)]
    return "\n".join(
        [
            markdown_table(header, rows),
            "",
            f"hit rate by prefix / of one worker: {hits[PREFIX] / hits[ONE]:.3f}",
            f"tokens/s by prefix / in turn, median of {len(ratios)} pairs: {statistics.median(ratios):.2f}",
        ]
    )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="pairs of runs by prefix and in turn")
    parser.add_argument("--prefixes", type=int, default=50)
    parser.add_argument("--per-prefix", type=int, default=4)
    parser.add_argument("--prefix-tokens", type=int, default=256)
    parser.add_argument("--own-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--kv-cache-tokens", type=int, default=32768, help="of each worker")
    parser.add_argument("--fake-step-ms", type=float, default=0.0)
    parser.add_argument("--out", type=Path, help="write the runs as JSON")
    options = parser.parse_args(arguments)
    if min(options.prefixes, options.per_prefix, options.concurrency, options.rounds, options.own_tokens) < 1:
        parser.error("counts must be at least 1")
    if options.workers < 2 or options.prefix_tokens < 64:
        parser.error("--workers must be at least 2 and --prefix-tokens at least 64: a page or more is shared")
    return options


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; the exit status."""
    options = parse_arguments(arguments)
    workload = Workload(
        options.prefixes, options.per_prefix, options.prefix_tokens, options.own_tokens, options.output_tokens,
        options.concurrency,
    )  # fmt: skip
    runs = []
    try:
        for name in [ONE, *([PREFIX, ROUND_ROBIN] * options.rounds)]:
            with server(options, name) as url:
                runs.append(run(name, url, workload))
    except (PipelineError, CommandError, ModelNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    facts = {**provenance(), "workload": asdict(workload), "fake_step_ms": options.fake_step_ms}
    print(json.dumps(facts, indent=2))
    print(tables(runs))
    failures = [failure for each in runs for failure in each.failures]
    for failure in failures:
        print(failure, file=sys.stderr)
    if options.out is not None:
        options.out.write_text(json.dumps(facts | {"runs": [asdict(each) for each in runs]}, indent=2) + "\n", "utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
