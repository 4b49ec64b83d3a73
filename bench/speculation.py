"""What speculation does to answers that copy their prompt and to answers that do not.

    python -m bench.speculation [MODEL] [--rounds 3] [--tokens 96] [--threads 1] [--numerics fast] [--out FILE]

Starts two servers, one with `--speculation ngram`, and asks both the same in turn (A B A B), one answer at a time. Says
the medians of the worker's processor time and of the whole answer, and their ratios. Processor time says the same on a
machine that does other things too; what waiting for results costs it does not show.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from bench.own_server import OwnServer
from bench.process_times import cpu_seconds
from bench.provenance import provenance
from services.launcher.bench.summary import markdown_table
from services.launcher.http.connection import Connection

STORY = (
    "The old mill stood by the river for two hundred years. Its wheel turned slowly in the summer and fast in the "
    "spring, when the snow melted in the hills. The miller had three daughters, who carried the flour to the village "
    "every morning."
)
PROMPTS = {
    "copies": f"{STORY}\n\nOnce more: {STORY}\n\nOnce more: {STORY[:40]}",
    "counts": "1, 2, 3, 4,",
    "invents": "Once upon a time, there was a",
}


@dataclass(frozen=True)
class Spent:
    """What one answer took, in seconds: of the worker's processors, and from asking to the end."""

    cpu_s: float
    wall_s: float


class Asked:
    """One of the servers, and what its answers took."""

    def __init__(self, server: OwnServer, connection: Connection) -> None:
        self._connection = connection
        self._worker = server.processes["gpu_worker"].pid
        self.spent: dict[str, list[Spent]] = {}

    async def ask(self, kind: str, num_tokens: int, counts: bool) -> None:
        """One answer of exactly so many tokens.

        Raises:
            ValueError: it has another number.
        """
        body = {"prompt": PROMPTS[kind], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        begun_cpu_s, begun_s = cpu_seconds(self._worker), perf_counter()
        response = await self._connection.request("POST", "/v1/completions", body)
        spent = Spent(cpu_seconds(self._worker) - begun_cpu_s, perf_counter() - begun_s)
        found = json.loads(response.body)
        if found.get("usage", {}).get("completion_tokens") != num_tokens:
            raise ValueError(f"not {num_tokens} tokens: {response.body[:200]!r}")
        if counts:
            self.spent.setdefault(kind, []).append(spent)


async def measure(servers: Sequence[OwnServer], num_rounds: int, num_tokens: int) -> list[Asked]:
    """Asks all servers in turn, once before that does not count."""
    connections = [await Connection.open(server.url) for server in servers]
    asked = [Asked(server, connection) for server, connection in zip(servers, connections, strict=True)]
    for kind in PROMPTS:
        for round_ in range(num_rounds + 1):
            for each in asked:
                await each.ask(kind, num_tokens, counts=round_ > 0)
    for connection in connections:
        connection.close()
    return asked


def rows_of(without: Mapping[str, Sequence[Spent]], with_: Mapping[str, Sequence[Spent]]) -> list[list[str]]:
    """A row for each kind of answer: medians without and with speculation, and how many times the one is the other."""
    rows = []
    for kind in without:
        off, on = _medians(without[kind]), _medians(with_[kind])
        cells = (off.cpu_s, on.cpu_s, off.cpu_s / on.cpu_s, off.wall_s, on.wall_s, off.wall_s / on.wall_s)
        rows.append([kind, *(f"{cell:.2f}" for cell in cells)])
    return rows


def _medians(every: Sequence[Spent]) -> Spent:
    return Spent(statistics.median(each.cpu_s for each in every), statistics.median(each.wall_s for each in every))


def main() -> int:
    """Runs the measurement; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--numerics", choices=("exact", "fast"), default="fast")
    parser.add_argument("--out", type=Path, default=None, help="write the table there too")
    options = parser.parse_args()
    flags = ["--numerics", options.numerics, "--num-threads", str(options.threads), "--kv-cache-tokens", "4096"]
    with ExitStack() as stack:
        servers = []
        for word in ("off", "ngram"):
            servers.append(OwnServer(options.model, [*flags, "--speculation", word]))
            stack.enter_context(servers[-1])
        without, with_ = asyncio.run(measure(servers, options.rounds, options.tokens))
    header = ["answer", "CPU s without", "with", "ratio", "s without", "with", "ratio"]
    text = "\n".join(
        [json.dumps(provenance(), indent=2), markdown_table(header, rows_of(without.spent, with_.spent)), ""]
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
