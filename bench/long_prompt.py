"""What a long prompt costs those who are being answered, and what they cost it.

    python -m bench.long_prompt [MODEL] [--prompt-tokens 4000] [--decodes 8] [--rounds 3] [--output-tokens 256]
        [--threads N] [--chunk N] [--out FILE]

Two servers, used in turn. With the default chunk (or `--chunk`) some answers are being streamed when a prompt of random
token ids arrives: the 99th percentile of the times between their tokens before it came, and while it was computed, is
what it costs them. The same number of tokens in one step, alone, on the second server is what it would cost without
chunks and without the others: prompt tokens per second up to the first token, beside those of the first server.

Ends with status 1 when an answer is wrong, or when those who were being answered ended before the prompt was computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.own_server import OwnServer
from bench.provenance import provenance
from services.launcher.bench.answers import Answer, Expected, read_answer
from services.launcher.bench.summary import markdown_table, summarize
from services.launcher.errors import CommandError
from services.launcher.http.connection import Connection
from services.launcher.http.response import Response

_IDS = range(1000, 30000)
_BEFORE_TOKENS = 48
"""Of every answer, until the long prompt is sent."""
_SKIPPED_TOKENS = 8
"""Of every answer, of which the times do not count: the prompts of the others come in between."""
_WHOLE_PROMPTS = "-1"
_LIMIT_S = 600.0


@dataclass(frozen=True)
class Arrival:
    """When the texts of the decodes came, and the long prompt; as `time.perf_counter` has it."""

    decodes: Sequence[Sequence[float]]
    sent_s: float
    first_token_s: float

    @property
    def is_covered(self) -> bool:
        """Whether every decode went on until the prompt was computed."""
        return all(times[-1] >= self.first_token_s for times in self.decodes)

    def gaps_before(self) -> list[float]:
        """Seconds between two texts before the prompt was sent."""
        counted = (times[_SKIPPED_TOKENS:] for times in self.decodes)
        return [later - earlier for times in counted for earlier, later in pairwise(times) if later <= self.sent_s]

    def gaps_during(self) -> list[float]:
        """Seconds between two texts, of which a part lies between the prompt's sending and its first token."""
        gaps = (gap for times in self.decodes for gap in pairwise(times))
        return [later - earlier for earlier, later in gaps if later > self.sent_s and earlier < self.first_token_s]


@dataclass(frozen=True)
class Round:
    """One arrival, and how long a prompt as long took alone and whole."""

    arrival: Arrival
    alone_s: float

    @property
    def among_s(self) -> float:
        """How long the prompt took among the decodes."""
        return self.arrival.first_token_s - self.arrival.sent_s


class Decodes:
    """Answers that are being streamed; `begun` is set once each has so many events."""

    def __init__(self, num_decodes: int) -> None:
        self.begun = asyncio.Event()
        self._num_missing = num_decodes * _BEFORE_TOKENS
        self._num_events = [0] * num_decodes

    async def run(self, connection: Connection, number: int, num_tokens: int) -> Answer:
        """Streams one of them: it counts on from a number, so that every token is text."""
        prompt = ", ".join(str(10 * number + step) for step in range(1, 6)) + ","
        body = body_of(prompt, num_tokens)
        response = await connection.request("POST", "/v1/completions", body, lambda _: self.count(number))
        return checked(response, Expected(num_tokens))

    def count(self, number: int) -> None:
        """An event of one of them has come."""
        self._num_events[number] += 1
        if self._num_events[number] <= _BEFORE_TOKENS:
            self._num_missing -= 1
        if not self._num_missing:
            self.begun.set()


def body_of(prompt: str | list[int], num_tokens: int) -> dict[str, object]:
    """A streamed greedy completion of an exact length."""
    return {
        "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def checked(response: Response, expected: Expected) -> Answer:
    """The answer; CommandError when it is not what it must be."""
    answer = read_answer(response, expected)
    if answer.failure:
        raise CommandError(answer.failure)
    return answer


async def ask_long(connection: Connection, num_tokens: int, numbers: random.Random) -> tuple[float, float]:
    """A prompt that nobody has computed; when it was sent and when its first token came."""
    response = await connection.request("POST", "/v1/completions", body_of(numbers.choices(_IDS, k=num_tokens), 1))
    checked(response, Expected(1, num_tokens))
    return response.sent_s, response.events[0][0]


async def arrive(url: str, options: argparse.Namespace, numbers: random.Random) -> Arrival:
    """Lets the prompt arrive among the decodes."""
    connections = [await Connection.open(url) for _ in range(options.decodes + 1)]
    decodes = Decodes(options.decodes)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(decodes.run(connection, number, options.output_tokens))
            for number, connection in enumerate(connections[1:])
        ]
        await decodes.begun.wait()
        sent_s, first_token_s = await ask_long(connections[0], options.prompt_tokens, numbers)
    for connection in connections:
        connection.close()
    arrival = Arrival([task.result().text_times_s for task in tasks], sent_s, first_token_s)
    if not arrival.is_covered:
        raise CommandError("the decodes ended before the prompt was computed: more --output-tokens are needed")
    return arrival


async def measure(chunked: str, whole: str, options: argparse.Namespace) -> list[Round]:
    """The rounds, after one that nobody counts."""
    numbers = random.Random(options.seed)
    rounds = []
    alone = await Connection.open(whole)
    for _ in range(1 + options.rounds):
        arrival = await arrive(chunked, options, numbers)
        sent_s, first_token_s = await ask_long(alone, options.prompt_tokens, numbers)
        rounds.append(Round(arrival, first_token_s - sent_s))
    alone.close()
    return rounds[1:]


def figures(rounds: Sequence[Round], num_prompt_tokens: int) -> dict[str, float]:
    """What the rounds come to: times of all of them together, rates and their ratio as medians."""
    before = summarize([gap for each in rounds for gap in each.arrival.gaps_before()])
    during = summarize([gap for each in rounds for gap in each.arrival.gaps_during()])
    return {
        "itl_p99_before_ms": before.p99_ms,
        "itl_p99_during_ms": during.p99_ms,
        "itl_p99_added_ms": round(during.p99_ms - before.p99_ms, 3),
        "itl_median_before_ms": before.median_ms,
        "itl_median_during_ms": during.median_ms,
        "prefill_among_tokens_per_s": round(statistics.median(num_prompt_tokens / each.among_s for each in rounds), 1),
        "prefill_alone_tokens_per_s": round(statistics.median(num_prompt_tokens / each.alone_s for each in rounds), 1),
        "prefill_share_kept": round(statistics.median(each.alone_s / each.among_s for each in rounds), 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    options = _options(arguments)
    source = provenance()
    room = ["--max-model-len", str(max(options.prompt_tokens, options.output_tokens) + 64)]
    flags = [*room, *(["--num-threads", str(options.threads)] if options.threads else [])]
    chunk = ["--chunked-prefill-size", str(options.chunk)] if options.chunk else []
    try:
        with (
            OwnServer(options.model, [*flags, *chunk]) as chunked,
            OwnServer(options.model, [*flags, "--chunked-prefill-size", _WHOLE_PROMPTS]) as whole,
        ):
            said = [line for line in chunked.lines if "warm-up:" in line]
            rounds = asyncio.run(asyncio.wait_for(measure(chunked.url, whole.url, options), _LIMIT_S))
    except TimeoutError:
        print(f"not done within {_LIMIT_S:.0f} s", file=sys.stderr)
        return 1
    except (CommandError, OSError, ExceptionGroup) as error:
        print(error, file=sys.stderr)
        return 1
    found = figures(rounds, options.prompt_tokens)
    print(json.dumps(source, indent=2))
    print(*said, sep="\n")
    print(markdown_table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in found.items()]))
    if options.out is not None:
        content = {**source, "warm_up": said, "rounds": options.rounds, "figures": found}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.long_prompt", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-tokens", type=int, default=256, help="of each decode")
    parser.add_argument("--threads", type=int, default=0, help="of each server's worker; 0: one for each core")
    parser.add_argument("--chunk", type=int, default=0, help="0: the default chunk")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args(arguments)
    if options.output_tokens <= _BEFORE_TOKENS or min(options.rounds, options.decodes) < 1:
        parser.error(f"--output-tokens must be more than {_BEFORE_TOKENS}, --rounds and --decodes at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
