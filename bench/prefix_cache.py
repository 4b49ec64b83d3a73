"""What a cached prefix saves: time to first token of a prompt of 1,000 tokens, new and with all but the end known.

    python -m bench.prefix_cache [MODEL] [--prefix-tokens 1000] [--rounds 5]

Starts a server. Each round asks twice, one after the other: a prefix of ids drawn at random and one id behind it, then
the same prefix and another id. Says both times of every round and the median of their ratios. Ends with status 1 when
an answer is wrong or the second request does not report the prefix as cached (whole pages of it).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from dataclasses import dataclass

from bench.own_server import OwnServer
from bench.provenance import provenance
from services.launcher.bench.answers import Answer, Expected, read_answer
from services.launcher.bench.summary import markdown_table
from services.launcher.http.connection import Connection

_OUTPUT_TOKENS = 4
_IDS = range(300, 40_000)  # below: control tokens and single bytes


@dataclass(frozen=True)
class Round:
    """The two answers of one prefix."""

    new: Answer
    known: Answer

    @property
    def ratio(self) -> float:
        """How many times sooner the first token came."""
        return self.new.first_s / self.known.first_s


async def ask(connection: Connection, prompt: list[int]) -> Answer:
    """One streamed answer, checked."""
    body = {
        "prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    response = await connection.request("POST", "/v1/completions", body)
    return read_answer(response, Expected(_OUTPUT_TOKENS, len(prompt)))


async def measure(url: str, num_prefix_tokens: int, num_rounds: int) -> list[Round]:
    """The rounds, one after another, after a request that nobody counts."""
    numbers = random.Random(0)
    connection = await Connection.open(url)
    await ask(connection, numbers.sample(_IDS, 64))
    rounds = []
    for _ in range(num_rounds):
        prefix = numbers.choices(_IDS, k=num_prefix_tokens)
        first, second = numbers.sample(_IDS, 2)
        rounds.append(Round(await ask(connection, [*prefix, first]), await ask(connection, [*prefix, second])))
    connection.close()
    return rounds


def report(rounds: list[Round]) -> None:
    """Prints a row for each round, and the median ratio."""
    header = ["round", "new: TTFT ms", "cached", "known: TTFT ms", "cached", "ratio"]
    rows = [
        [
            str(number),
            *(f"{1000 * each.new.first_s:.1f}", str(each.new.cached_tokens)),
            *(f"{1000 * each.known.first_s:.1f}", str(each.known.cached_tokens), f"{each.ratio:.1f}"),
        ]
        for number, each in enumerate(rounds, 1)
    ]
    print(json.dumps(provenance(), indent=2))
    print(markdown_table(header, rows))
    print(f"median ratio: {statistics.median(each.ratio for each in rounds):.1f}")


def main() -> int:
    """Runs the measurement; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_cache", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    server = OwnServer(options.model)
    try:
        rounds = asyncio.run(measure(server.url, options.prefix_tokens, options.rounds))
    finally:
        server.stop()
    answers = [answer for each in rounds for answer in (each.new, each.known)]
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        print("\n".join(failures), file=sys.stderr)
        return 1
    report(rounds)
    # A page is shared only when it is full; pages of up to 64 tokens are usual.
    is_cached = all(each.known.cached_tokens > options.prefix_tokens - 64 for each in rounds)
    return 0 if is_cached else 1


if __name__ == "__main__":
    sys.exit(main())
