"""Closed-loop load on a running server: time to first token, time between tokens, tokens per second.

    python -m bench.load --url http://127.0.0.1:8000 --streams 1 8 32 --prompt-tokens 128 --output-tokens 128

Each of `--streams` connections sends its next request when its last one has ended. Prompts are token ids drawn at
random (so no text has to be encoded and no prefix is found in the cache, unless `--shared-prefix` asks for one), or
chats of random words with `--chat`. Every answer is checked: status, form, finish reason, the exact number of tokens.
Ends with status 1 when any failed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.answers import Answer, Expected, read_answer
from bench.http_stream import Connection, Response, ResponseError
from bench.provenance import provenance
from bench.summary import Summary, markdown_table, summarize

_WORDS = ("apple", "river", "stone", "cloud", "garden", "winter", "music", "letter", "window", "silver", "forest")
_PROGRESS_S = 0.5


@dataclass(frozen=True)
class Workload:
    """What is asked for. `token_ids` is the range that prompt ids are drawn from."""

    prompt_tokens: int
    output_tokens: int
    shared_prefix: int
    token_ids: range
    is_chat: bool
    seed: int

    @property
    def path(self) -> str:
        """The route."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def expected(self) -> Expected:
        """What every answer's usage must say. A chat's prompt length depends on the template."""
        return Expected(self.output_tokens, None if self.is_chat else self.prompt_tokens)

    def body(self, model: str, number: int) -> dict[str, Any]:
        """Request `number`: no two are alike beyond the shared prefix, the same number is always the same."""
        common = random.Random(f"{self.seed} shared")
        own = random.Random(f"{self.seed} {number}")
        drawers = [common] * self.shared_prefix + [own] * (self.prompt_tokens - self.shared_prefix)
        request: dict[str, Any] = {
            "model": model,
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            words = " ".join(drawer.choice(_WORDS) for drawer in drawers)
            return request | {"messages": [{"role": "user", "content": words}]}
        return request | {"prompt": [drawer.choice(self.token_ids) for drawer in drawers]}


@dataclass
class RunResult:
    """One run at one number of streams. Rates count answers without failure only."""

    streams: int
    requests: int
    duration_s: float
    failures: dict[str, int]
    ttft: Summary
    itl: Summary
    tpot: Summary
    e2e: Summary
    output_tokens_per_s: float
    total_tokens_per_s: float
    cached_tokens: int

    @classmethod
    def of(cls, streams: int, answers: Sequence[Answer], duration_s: float) -> RunResult:
        """Puts the answers of a run together."""
        good = [answer for answer in answers if not answer.failure]
        output_tokens = sum(answer.output_tokens for answer in good)
        prompt_tokens = sum(answer.prompt_tokens for answer in good)
        return cls(
            streams=streams,
            requests=len(answers),
            duration_s=round(duration_s, 3),
            failures=dict(Counter(answer.failure for answer in answers if answer.failure)),
            ttft=summarize([answer.first_s for answer in good]),
            itl=summarize([gap for answer in good for gap in answer.gaps_s]),
            tpot=summarize([answer.per_token_s for answer in good]),
            e2e=summarize([answer.total_s for answer in good]),
            output_tokens_per_s=round(output_tokens / duration_s, 2),
            total_tokens_per_s=round((output_tokens + prompt_tokens) / duration_s, 2),
            cached_tokens=sum(answer.cached_tokens for answer in good),
        )


@dataclass
class _Run:
    """The requests of one run while it goes on."""

    url: str
    model: str
    workload: Workload
    numbers: range
    responses: list[Response | str] = field(default_factory=list)
    num_events: int = 0
    started_s: float = field(default_factory=time.perf_counter)
    _next: int = 0

    async def stream(self) -> None:
        """One connection, one request after the other, until none is left; a broken connection is opened again."""
        connection: Connection | None = None
        while self._next < len(self.numbers):
            number = self.numbers[self._next]
            self._next += 1
            try:
                connection = connection or await Connection.open(self.url)
                body = self.workload.body(self.model, number)
                self.responses.append(await connection.request("POST", self.workload.path, body, self._count))
            except (ResponseError, OSError) as error:
                self.responses.append(str(error))
                connection = None
        if connection is not None:
            connection.close()

    async def show_progress(self) -> None:
        """A line on the terminal that is written over and over, until cancelled."""
        while True:
            elapsed_s = time.perf_counter() - self.started_s
            rate = self.num_events / max(elapsed_s, 1e-9)
            line = f"{len(self.responses)}/{len(self.numbers)} requests, {rate:.0f} events/s, {elapsed_s:.0f} s"
            sys.stderr.write(f"\r\033[K{line}")
            sys.stderr.flush()
            await asyncio.sleep(_PROGRESS_S)

    def _count(self, time_s: float) -> None:
        self.num_events += 1


async def run_load(url: str, workload: Workload, streams: int, numbers: range) -> RunResult:
    """Sends the requests of these numbers over `streams` connections and reads what came back."""
    run = _Run(url, await served_model(url), workload, numbers)
    progress = asyncio.create_task(run.show_progress()) if sys.stderr.isatty() else None
    run.started_s = time.perf_counter()
    await asyncio.gather(*(run.stream() for _ in range(streams)))
    duration_s = time.perf_counter() - run.started_s
    if progress is not None:
        progress.cancel()
        sys.stderr.write("\r\033[K")
    answers = [
        Answer(failure=response) if isinstance(response, str) else read_answer(response, workload.expected)
        for response in run.responses
    ]
    return RunResult.of(streams, answers, duration_s)


async def served_model(url: str) -> str:
    """The name of the first model that the server has."""
    connection = await Connection.open(url)
    response = await connection.request("GET", "/v1/models")
    connection.close()
    if response.status != 200:
        raise ResponseError(f"/v1/models answered {response.status}")
    return str(json.loads(response.body)["data"][0]["id"])


def table(results: Sequence[RunResult]) -> str:
    """The results for people; times are mean / median / 99th percentile."""
    header = ["streams", "requests", "failed", "TTFT ms", "ITL ms", "TPOT ms", "E2E ms", "output tok/s", "total tok/s"]
    rows = [
        [str(r.streams), str(r.requests), str(sum(r.failures.values())), str(r.ttft), str(r.itl), str(r.tpot),
         str(r.e2e), f"{r.output_tokens_per_s:.1f}", f"{r.total_tokens_per_s:.1f}"]
        for r in results
    ]  # fmt: skip
    return markdown_table(header, rows)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.load", description="Closed-loop load on a running server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="one run for each number")
    parser.add_argument("--requests", type=int, default=0, help="of each run (default: 4 for each stream)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="ids, or words with --chat")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--shared-prefix", type=int, default=0, help="of the prompt, the same in all requests")
    parser.add_argument("--token-ids", type=int, nargs=2, default=[1000, 30000], metavar=("FROM", "TO"))
    parser.add_argument("--chat", action="store_true", help="chats of random words instead of token ids")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args(arguments)
    if min(*options.streams, options.output_tokens, options.prompt_tokens, 1) < 1:
        parser.error("streams and tokens must be at least 1")
    if not 0 <= options.shared_prefix <= options.prompt_tokens:
        parser.error("--shared-prefix is a part of --prompt-tokens")
    if not 0 <= options.token_ids[0] < options.token_ids[1]:
        parser.error("--token-ids must be a range")
    return options


async def _run_all(options: argparse.Namespace) -> list[RunResult]:
    results: list[RunResult] = []
    workload = Workload(
        options.prompt_tokens, options.output_tokens, options.shared_prefix, range(*options.token_ids), options.chat,
        options.seed,
    )  # fmt: skip
    warm_up = await run_load(options.url, workload, 1, range(1))
    if warm_up.failures:
        raise ResponseError(f"the first request failed: {next(iter(warm_up.failures))}")
    first = 1  # numbers are never used twice, so no run finds the prompts of another in the cache
    for streams in options.streams:
        num_requests = options.requests or 4 * streams
        results.append(await run_load(options.url, workload, streams, range(first, first + num_requests)))
        first += num_requests
    return results


def main(arguments: Sequence[str]) -> int:
    """Runs, prints, writes; the exit status."""
    options = parse_arguments(arguments)
    try:
        results = asyncio.run(_run_all(options))
    except (ResponseError, OSError) as error:
        print(f"{options.url}: {error}", file=sys.stderr)
        return 1
    print(table(results))
    failures = [(result.streams, *failure) for result in results for failure in result.failures.items()]
    for streams, reason, count in failures:
        print(f"{streams} streams: {count} x {reason}", file=sys.stderr)
    if options.out is not None:
        content = {**provenance(), "workload": {name: value for name, value in vars(options).items() if name != "out"},
                   "runs": [dataclasses.asdict(result) for result in results]}  # fmt: skip
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
