"""Structured output on a real model: do answers fit their schemas, and what do the masks cost?

    python -m bench.structured_output [MODEL] [--requests 200] [--streams 16] [--seconds 20] [--url URL]

Starts a server. First `--requests` chats at temperature 1, up to 2,000 tokens each, one schema of `real_schemas` after
the other, `--streams` at a time: every answer that ends with `stop` must parse and fit its schema, and 95 % must end
so. Then 16 streams for `--seconds`, of which first one and then all keep to schemas, the others write free text: the
time of grammars in a step, by the worker's own timer, against the median step. Ends with status 1 when an answer is
wrong, too few end, or grammars take more than 5 % of the median step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import jsonschema

from bench.metric_samples import Histogram, histogram_between, read_samples
from bench.own_server import OwnServer
from bench.provenance import provenance
from bench.real_schemas import SCHEMAS
from services.launcher.bench.summary import markdown_table
from services.launcher.http.connection import Connection

MAX_TOKENS = 2000
NEEDED_SHARE = 0.95
MASK_SHARE = 0.05
_SETTLE_S = 3.0  # until all streams decode, and the metrics of that time have come through


@dataclass(frozen=True)
class Outcome:
    """One answer: its schema, how it ended, what is wrong with it ("" for nothing), its tokens."""

    name: str
    finish: str
    problem: str
    num_tokens: int


@dataclass(frozen=True)
class MaskCost:
    """What grammars cost with so many rows of 16: times of a step in milliseconds."""

    num_grammar_rows: int
    mask_mean_ms: float
    mask_median_ms: float
    wait_mean_ms: float
    step_median_ms: float
    num_steps: int

    @property
    def share(self) -> float:
        """Of the median step."""
        return self.mask_mean_ms / self.step_median_ms


def problem_of(text: str, schema: Mapping[str, Any]) -> str:
    """Why a text does not fit a schema; "" when it does. Decimals, as 0.07 is no multiple of 0.01 in binary."""
    try:
        value = json.loads(text, parse_float=Decimal)
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        jsonschema.validate(value, exact, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


def chat_body(name: str, seed: int) -> dict[str, Any]:
    """A request for an answer in one of the schemas."""
    question, schema = SCHEMAS[name]
    return {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS, "temperature": 1, "seed": seed,
        "response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}},
    }  # fmt: skip


async def ask(connection: Connection, name: str, seed: int) -> Outcome:
    """One answer, checked."""
    response = await connection.request("POST", "/v1/chat/completions", chat_body(name, seed))
    if response.status != 200:
        return Outcome(name, "error", response.refusal(), 0)
    answer = json.loads(response.body)
    choice = answer["choices"][0]
    finish = choice["finish_reason"]
    problem = problem_of(choice["message"]["content"], SCHEMAS[name][1]) if finish == "stop" else ""
    return Outcome(name, finish, problem, answer["usage"]["completion_tokens"])


async def ask_all(url: str, num_requests: int, num_streams: int) -> list[Outcome]:
    """So many answers, one schema after the other."""
    wanted = iter(list(enumerate(itertools.islice(itertools.cycle(SCHEMAS), num_requests))))

    async def run() -> list[Outcome]:
        connection = await Connection.open(url)
        outcomes = [await ask(connection, name, seed) for seed, name in wanted]
        connection.close()
        return outcomes

    streams = await asyncio.gather(*(run() for _ in range(num_streams)))
    return list(itertools.chain.from_iterable(streams))


# ---------------------------------------------------------------- what masks cost


async def write_freely(connection: Connection, seed: int) -> None:
    """A stream of free text that does not end by itself."""
    while True:
        body = {"prompt": f"Once upon a time {seed}", "max_tokens": MAX_TOKENS, "temperature": 1, "seed": seed,
                "ignore_eos": True}  # fmt: skip
        await connection.request("POST", "/v1/completions", body)


async def keep_to_schemas(connection: Connection, seeds: Iterator[int]) -> None:
    """A stream of one structured answer after the other."""
    names = list(SCHEMAS)
    for seed in seeds:
        await ask(connection, names[seed % len(names)], seed)


async def mask_cost(url: str, num_grammar_rows: int, num_streams: int, seconds: float) -> MaskCost:
    """Runs streams for a while and reads the worker's timers."""
    connections = [await Connection.open(url) for _ in range(num_streams)]
    seeds = itertools.count()
    tasks = [
        asyncio.ensure_future(
            keep_to_schemas(connection, seeds) if index < num_grammar_rows else write_freely(connection, index)
        )
        for index, connection in enumerate(connections)
    ]
    scrape = await Connection.open(url)
    await asyncio.sleep(_SETTLE_S)
    before = await samples(scrape)
    await asyncio.sleep(seconds)
    after = await samples(scrape)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for connection in [*connections, scrape]:
        connection.close()
    masks, waits, steps = (
        histogram_between(before, after, f"tokenway:worker_{name}_seconds") for name in ("mask", "mask_wait", "step")
    )
    return cost_of(num_grammar_rows, masks, waits, steps)


def cost_of(num_grammar_rows: int, masks: Histogram, waits: Histogram, steps: Histogram) -> MaskCost:
    """The numbers of one run; times are in milliseconds."""
    return MaskCost(
        num_grammar_rows,
        mask_mean_ms=1000 * masks.mean,
        mask_median_ms=1000 * masks.quantile(0.5),
        wait_mean_ms=1000 * waits.mean,
        step_median_ms=1000 * steps.quantile(0.5),
        num_steps=int(steps.count),
    )


async def samples(connection: Connection) -> Mapping[str, float]:
    """The metrics of all processes."""
    return read_samples((await connection.request("GET", "/metrics")).body.decode())


# ---------------------------------------------------------------- the report


def answers_table(outcomes: Sequence[Outcome]) -> str:
    """A row for each schema."""
    rows = []
    for name in dict.fromkeys(outcome.name for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.name == name]
        ended = [outcome for outcome in mine if outcome.finish == "stop"]
        tokens = sum(outcome.num_tokens for outcome in mine) / len(mine)
        wrong = sum(bool(outcome.problem) for outcome in mine)
        rows.append([name, str(len(mine)), str(len(ended)), str(wrong), f"{tokens:.0f}"])
    return markdown_table(["schema", "answers", "ended with stop", "wrong", "mean tokens"], rows)


def costs_table(costs: Sequence[MaskCost]) -> str:
    """A row for each number of rows with a grammar."""
    header = ["grammar rows", "mask mean ms", "mask median ms", "waited ms", "step median ms", "share", "steps"]
    rows = [
        [str(c.num_grammar_rows), f"{c.mask_mean_ms:.2f}", f"{c.mask_median_ms:.2f}", f"{c.wait_mean_ms:.2f}",
         f"{c.step_median_ms:.1f}", f"{100 * c.share:.1f} %", str(c.num_steps)]
        for c in costs
    ]  # fmt: skip
    return markdown_table(header, rows)


def failures(outcomes: Sequence[Outcome], costs: Sequence[MaskCost]) -> list[str]:
    """What is not as it has to be."""
    found = [f"{outcome.name}: {outcome.problem}" for outcome in outcomes if outcome.problem]
    ends = Counter(outcome.finish for outcome in outcomes)
    if ends["stop"] < NEEDED_SHARE * len(outcomes):
        found.append(f"only {ends['stop']} of {len(outcomes)} answers end with stop")
    found += [
        f"with {cost.num_grammar_rows} grammar rows the masks take {100 * cost.share:.1f} % of a step"
        for cost in costs
        if not cost.share <= MASK_SHARE
    ]
    return found


async def measure(url: str, options: argparse.Namespace) -> tuple[list[Outcome], list[MaskCost]]:
    """Everything, one after the other."""
    outcomes = await ask_all(url, options.requests, options.streams)
    counts = (1, options.streams) if options.seconds > 0 else ()
    costs = [await mask_cost(url, num_rows, options.streams, options.seconds) for num_rows in counts]
    return outcomes, costs


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.structured_output", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of masks (0: none)")
    parser.add_argument("--url", default="", help="a running server (default: one of its own)")
    options = parser.parse_args(arguments)
    if min(options.requests, options.streams) < 1 or options.seconds < 0:
        parser.error("requests and streams must be at least 1, seconds at least 0")
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the measurement; returns the exit status."""
    options = parse_arguments(arguments)
    if options.url:
        outcomes, costs = asyncio.run(measure(options.url, options))
    else:
        server = OwnServer(options.model, ["--max-running-requests", str(options.streams)])
        try:
            outcomes, costs = asyncio.run(measure(server.url, options))
        finally:
            server.stop()
    print(json.dumps(provenance(), indent=2))
    print(answers_table(outcomes))
    print(costs_table(costs))
    ends = Counter(outcome.finish for outcome in outcomes)
    print(f"{len(outcomes)} answers of {len({outcome.name for outcome in outcomes})} schemas: {dict(ends)}")
    problems = failures(outcomes, costs)
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
