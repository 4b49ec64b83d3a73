"""Tokenway beside llama-server and transformers: the same prompts on the same machine, in turn (A B A B), as ratios.

    python -m bench.peers --llama-server DIR/bin/llama-server --gguf Q4_0.gguf Q4_1.gguf Q8_0.gguf
        [--model smollm2:135m] [--rounds 5] [--threads 2] [--transformers] [--speculation] [--only NUMBER ...]
        [--max-minutes 60] [--out FILE]

All servers answer over HTTP on this machine, each with as many threads as it is told, and llama-server with as many
slots as there are streams. Each round runs every server once, one after the other, always in the same order, each with
prompts that no run before it had; what is printed is the median of the rounds and, of the best of llama-server's files,
the median of the ratios within a round. Prompts are random token ids; every answer must have exactly the tokens that
were asked for. `--transformers` adds its `generate` in float32 to the workloads with a rate, as one batch after the
other and without HTTP; it reads the demo's GGUF file too. `--speculation` adds a second Tokenway, with `--speculation
ngram`, to the workload of one stream, with a ratio of its own. No variable may tell OpenMP how to wait: with
OMP_WAIT_POLICY=PASSIVE, which Tokenway's worker sets for itself, llama-server is several times slower.

How long it will take is said at the start, from what two cores do with a small model, and again after each round. Each
workload has its share of `--max-minutes`: what does not fit loses rounds, never its first.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.own_server import OwnServer
from bench.peer_servers import Contender, Load, OutOfTimeError, llama_server, of_transformers, over_http
from bench.provenance import provenance
from services.launcher.bench.summary import markdown_table
from services.launcher.errors import CommandError
from services.launcher.models import resolve_model
from services.runtime.config import Settings

_OF_THREADS = ("OMP_", "GOMP_", "KMP_")  # variables that tell a program's threads how to wait and where to run
_TOKENWAY, _SPECULATING, _TRANSFORMERS = "tokenway", "tokenway --speculation ngram", "transformers"

LOADS = (
    Load("1 stream, 128 + 128", 1, 2, 0, 128, 128),
    Load("16 streams, 256 + 128", 16, 32, 0, 256, 128),
    Load("32 streams, 128 + 128", 32, 64, 0, 128, 128),
    Load("8 at a time, 32 requests that share 1,024 tokens, + 32 + 32", 8, 32, 1024, 32, 32),
    Load("first token of 2,048", 1, 2, 0, 2048, 1, "ttft"),
)

Figures = dict[str, list[float]]
"""The figure of each round by contender."""


class Share:
    """The time that one workload may take: its part of what is left to all that are still to come."""

    def __init__(self, load: Load, to_come: Sequence[Load], deadline_s: float) -> None:
        """`to_come` includes the load itself; times are those of `time.monotonic`."""
        self._began_s = time.monotonic()
        self._deadline_s = deadline_s
        part = load.expected_s / sum(each.expected_s for each in to_come)
        self._share_s = (deadline_s - self._began_s) * part

    @property
    def left_s(self) -> float:
        """How long a run may take before all of the time is over."""
        return self._deadline_s - time.monotonic()

    def has_room(self, num_rounds: int) -> bool:
        """Whether another round fits in after so many, when it takes as long as they did."""
        elapsed_s = time.monotonic() - self._began_s
        return elapsed_s + elapsed_s / num_rounds <= self._share_s

    def say(self, load: Load, num_rounds: int, wanted: int) -> None:
        """Says what the other rounds will take."""
        each_s = (time.monotonic() - self._began_s) / num_rounds
        left = wanted - num_rounds
        _note(f"{load.name}: {each_s:.0f} s a round, {left} to come: about {left * each_s:.0f} s")


def measure(load: Load, share: Share, options: argparse.Namespace, generator: random.Random) -> Figures:
    """The figures of a workload. All its servers run side by side and are asked one at a time."""
    found: Figures = {}
    with contextlib.ExitStack() as stack:
        contenders = _contenders(load, options, stack)
        for round_ in range(options.rounds):
            if round_ > 0:
                share.say(load, round_, options.rounds)
                if not share.has_room(round_):
                    _note(f"{load.name}: no time for more than {round_} of {options.rounds} rounds")
                    break
            figures: dict[str, float] = {}
            try:
                for name, run in contenders.items():
                    figures[name] = run(load, generator.getrandbits(31), share.left_s)
                    _note(f"{load.name}, round {round_ + 1}: {name} {figures[name]:.1f}")
            except OutOfTimeError:
                if round_ == 0:
                    raise
                _note(f"{load.name}: round {round_ + 1} was not done in time and does not count")
                break
            for name, figure in figures.items():
                found.setdefault(name, []).append(figure)
    return found


def _contenders(load: Load, options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Contender]:
    flags = ["--num-threads", str(options.threads), "--max-running-requests", "64"]
    contenders = {_TOKENWAY: over_http(stack.enter_context(OwnServer(options.model, flags)).url)}
    if options.speculation and load.streams == 1 and load.figure != "ttft":
        server = stack.enter_context(OwnServer(options.model, [*flags, "--speculation", "ngram"]))
        contenders[_SPECULATING] = over_http(server.url)
    for gguf in options.gguf:
        url = stack.enter_context(llama_server(options.llama_server, gguf, options.threads, load))
        contenders[gguf.name] = over_http(url)
    if options.transformers and load.figure != "ttft":
        path = resolve_model(options.model, Settings()).path
        contenders[_TRANSFORMERS] = of_transformers(Path(path), options.threads)
    return contenders


def best_peer(load: Load, found: Figures) -> str:
    """Of llama-server's files the one with the best median."""
    peers = [name for name in found if name not in (_TOKENWAY, _SPECULATING, _TRANSFORMERS)]
    better = min if load.figure == "ttft" else max
    return better(peers, key=lambda name: statistics.median(found[name]))


def ratio_to(peer: str, found: Figures, ours: str = _TOKENWAY) -> float:
    """The median of the ratios within a round: Tokenway's figure over a peer's."""
    return statistics.median(mine / theirs for mine, theirs in zip(found[ours], found[peer], strict=True))


def summary(load: Load, found: Figures) -> list[str]:
    """A line of the table."""
    peer = best_peer(load, found)
    medians = {name: statistics.median(values) for name, values in found.items()}
    others = ", ".join(f"{name} {median:.1f}" for name, median in medians.items() if name != _TOKENWAY)
    unit = "ms to the first token" if load.figure == "ttft" else "output tok/s"
    ratio = f"{ratio_to(peer, found):.2f} ({peer})"
    if _SPECULATING in found:
        ratio += f", speculating {ratio_to(peer, found, _SPECULATING):.2f}"
    return [load.name, unit, f"{medians[_TOKENWAY]:.1f}", others, ratio]


def estimate_s(loads: Sequence[Load], num_contenders: int, num_rounds: int) -> float:
    """How long it all takes, more or less, on the machine that `Load.expected_s` has in mind."""
    return sum(load.expected_s for load in loads) * num_contenders * num_rounds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; status 1 when an answer was wrong, a server did not run or the time was over."""
    options = _options(arguments)
    source = {**provenance(), **_versions(options)}
    chosen = [LOADS[number] for number in options.only or range(len(LOADS))]
    estimated_s = estimate_s(chosen, 1 + len(options.gguf) + options.transformers, options.rounds)
    _note(f"about {estimated_s / 60:.0f} min on two idle cores, at most {options.max_minutes:.0f} min")
    generator = random.Random(options.seed)
    deadline_s = time.monotonic() + 60 * options.max_minutes
    results: dict[str, Figures] = {}
    try:
        for number, load in enumerate(chosen):
            results[load.name] = measure(load, Share(load, chosen[number:], deadline_s), options, generator)
    except (CommandError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    rows = [summary(load, results[load.name]) for load in chosen]
    print(markdown_table(["workload", "figure", "tokenway", "the others", "ratio to llama-server's best"], rows))
    if options.out is not None:
        content = {**source, "threads": options.threads, "seed": options.seed, "loads": _entries(chosen, results)}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, nargs="+", required=True, help="files of the same model for llama-server")
    parser.add_argument("--model", default="smollm2:135m", help="what Tokenway serves")
    parser.add_argument("--rounds", type=int, default=5, help="at most; at least 1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--speculation", action="store_true", help="one stream also with --speculation ngram")
    parser.add_argument("--only", type=int, nargs="+", choices=range(len(LOADS)), help="workloads by number")
    parser.add_argument("--max-minutes", type=float, default=60.0, help="what does not fit in loses rounds")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    if told := sorted(name for name in os.environ if name.startswith(_OF_THREADS)):
        parser.error(
            f"{told[0]} is set, and all servers would take it: unset it, so that each waits as it does by itself"
        )
    return options


def _versions(options: argparse.Namespace) -> dict[str, str]:
    """Of the peers, as they name them."""
    told = subprocess.run(
        [options.llama_server, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    versions = {"llama-server": " ".join(told.stdout.split())}
    if options.transformers:
        versions[_TRANSFORMERS] = importlib.metadata.version("transformers")
    return versions


def _entries(chosen: Sequence[Load], results: dict[str, Figures]) -> dict[str, dict[str, object]]:
    """What the file says of each workload."""
    entries: dict[str, dict[str, object]] = {}
    for load in chosen:
        found = results[load.name]
        peer = best_peer(load, found)
        entry = {**asdict(load), "figures": found, "best_peer": peer, "ratio": ratio_to(peer, found)}
        if _SPECULATING in found:
            entry["ratio_speculating"] = ratio_to(peer, found, _SPECULATING)
        entries[load.name] = entry
    return entries


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
