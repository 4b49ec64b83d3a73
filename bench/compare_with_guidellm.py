"""Whether `tokenway bench` measures what another load tool measures: the same prompts, sent by both in turn.

    python -m venv /some/venv && /some/venv/bin/pip install guidellm==0.8.1      (it needs torch: a CPU build will do)
    python -m bench.compare_with_guidellm --guidellm /some/venv/bin/guidellm

Starts a server of its own without a prefix cache, so that both find the same work, with a worker of one thread: that
leaves a core to the tools (on two cores guidellm slows a worker of two threads by a seventh). The tools take turns, A B
B A and so on, so that a machine that becomes faster or slower harms neither. Token counts must be equal and the medians
over all rounds within 10 %: time to first token, time between tokens (the mean of each answer: what `tokenway bench`
calls TPOT and guidellm ITL), time to the end. Status 1 when they are not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.own_server import OwnServer
from bench.provenance import provenance
from services.launcher.bench.summary import markdown_table
from services.launcher.bench.workloads import WORDS
from services.launcher.errors import CommandError
from services.runtime.config import inherited_environment

_MOST_DIFFERENCE = 0.1
_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Figures:
    """What a tool says of one run; times are medians in milliseconds."""

    requests: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    per_token_ms: float
    e2e_ms: float

    @classmethod
    def of_tokenway(cls, content: dict[str, Any]) -> Figures:
        """From the file of `tokenway bench --out`."""
        medians = [content[name]["median_ms"] for name in ("ttft", "tpot", "e2e")]
        good = content["requests"] - sum(content["failures"].values())
        return cls(good, content["input_tokens"], content["output_tokens"], *medians)

    @classmethod
    def of_guidellm(cls, content: dict[str, Any]) -> Figures:
        """From its report as JSON."""
        [run] = content["benchmarks"]
        good = run["requests"]["successful"]
        return cls(
            requests=len(good),
            input_tokens=sum(request["prompt_tokens"] for request in good),
            output_tokens=sum(request["output_tokens"] for request in good),
            ttft_ms=statistics.median(request["time_to_first_token_ms"] for request in good),
            per_token_ms=statistics.median(request["inter_token_latency_ms"] for request in good),
            e2e_ms=statistics.median(1000 * request["request_latency"] for request in good),
        )


def write_prompts(path: Path, options: argparse.Namespace) -> None:
    """The prompts, in a form that both tools read."""
    generator = random.Random(options.seed)
    lines = [
        {"prompt": " ".join(generator.choices(WORDS, k=options.words)), "output_tokens_count": options.output_tokens}
        for _ in range(options.num_prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def run_tokenway(url: str, prompts: Path, options: argparse.Namespace) -> Figures:
    """One run of our tool."""
    out = prompts.with_name("tokenway.json")
    _run([
        sys.executable, "-m", "services.launcher", "bench", "--url", url, "--workload", "jsonl", "--file", str(prompts),
        "--endpoint", "completions", "--concurrency", str(options.concurrency), "--out", str(out),
        "--num-prompts", str(options.num_prompts), "--warm-up", "0",
    ])  # fmt: skip
    return Figures.of_tokenway(json.loads(out.read_text(encoding="utf-8")))


def run_guidellm(url: str, prompts: Path, options: argparse.Namespace) -> Figures:
    """One run of the other."""
    out = prompts.with_name("guidellm.json")
    _run([
        options.guidellm, "run", "--backend", f"kind=openai_http,target={url},request_format=/v1/completions",
        "--data", f"kind=json_file,path={prompts}", "--profile", f"kind=concurrent,streams={options.concurrency}",
        "--output", f"kind=json,path={out}", "--disable-console",
    ])  # fmt: skip
    return Figures.of_guidellm(json.loads(out.read_text(encoding="utf-8")))


def _run(command: Sequence[str]) -> None:
    environment = inherited_environment() | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise CommandError(f"{command[0]} ended with status {done.returncode}: {said[-1] if said else ''}")


def difference(ours: float, theirs: float) -> float:
    """How far two figures lie apart, as a share of the smaller."""
    return abs(ours - theirs) / max(min(ours, theirs), 1e-9)


def verdict(ours: Sequence[Figures], theirs: Sequence[Figures]) -> tuple[str, bool]:
    """The table of both tools' figures, each the median of its rounds, and whether they agree."""
    rows, agrees = [], True
    for name in ("requests", "input_tokens", "output_tokens", "ttft_ms", "per_token_ms", "e2e_ms"):
        own, other = (statistics.median(getattr(round_, name) for round_ in rounds) for rounds in (ours, theirs))
        apart = difference(own, other)
        agrees = agrees and apart <= (_MOST_DIFFERENCE if name.endswith("_ms") else 0)
        rows.append([name, f"{own:.1f}", f"{other:.1f}", f"{100 * apart:.1f} %"])
    return markdown_table(["median of rounds", "tokenway bench", "guidellm", "apart"], rows), agrees


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare_with_guidellm")
    parser.add_argument("model", nargs="?", default="smollm2:135m", help="what to serve (default: the demo model)")
    parser.add_argument("--guidellm", default="guidellm", help="the program (default: the one on PATH)")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--words", type=int, default=64, help="of each prompt")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6, help="of both tools, in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures of all rounds as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measures, prints, writes; the exit status."""
    options = parse_arguments(arguments)
    ours: list[Figures] = []
    theirs: list[Figures] = []
    with (
        tempfile.TemporaryDirectory(prefix="compare-") as folder,
        OwnServer(options.model, ["--no-enable-prefix-caching", "--num-threads", "1"]) as server,
    ):
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(prompts, options)
        run_tokenway(server.url, prompts, options)  # the server's first steps, which nobody counts
        turns = [(ours, run_tokenway), (theirs, run_guidellm)]
        for _ in range(options.rounds):
            for figures, run in turns:
                figures.append(run(server.url, prompts, options))
            turns.reverse()
            print(f"tokenway {ours[-1]}\nguidellm {theirs[-1]}", file=sys.stderr)
    table, agrees = verdict(ours, theirs)
    print(table)
    if options.out is not None:
        rounds = {"tokenway": [vars(round_) for round_ in ours], "guidellm": [vars(round_) for round_ in theirs]}
        options.out.write_text(json.dumps({**provenance(), **rounds}, indent=2) + "\n", encoding="utf-8")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
