"""Closed-loop load at several numbers of streams, one run after the other, for the results that are kept.

    python -m bench.load --url http://127.0.0.1:8000 --streams 1 8 32 --prompt-tokens 128 --output-tokens 128

Each of `--streams` connections sends its next request when its last one has ended. Prompts are token ids drawn at
random (so no text has to be encoded and no prefix is found in the cache, unless `--shared-prefix` asks for one), or
chats of random words with `--chat`. Every answer is checked: status, form, finish reason, the exact number of tokens.
Ends with status 1 when any failed. `tokenway bench` is the same for one run, with more workloads.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.provenance import provenance
from services.launcher.bench.report import Report
from services.launcher.bench.runner import Pace, run_sessions
from services.launcher.bench.sessions import RequestForm
from services.launcher.bench.summary import markdown_table
from services.launcher.bench.workloads import Lengths, Workload
from services.launcher.errors import CommandError
from services.launcher.http.client import Client
from services.launcher.http.server_address import ServerAddress


def table(results: Sequence[tuple[int, Report]]) -> str:
    """The results for people; times are mean / median / 99th percentile."""
    header = ["streams", "requests", "failed", "TTFT ms", "ITL ms", "TPOT ms", "E2E ms", "output tok/s", "total tok/s"]
    rows = [
        [str(streams), str(r.requests), str(r.num_failed), str(r.ttft), str(r.itl), str(r.tpot), str(r.e2e),
         f"{r.output_tokens_per_s:.1f}", f"{r.total_tokens_per_s:.1f}"]
        for streams, r in results
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
    parser.add_argument("--seed", type=int, help="of the prompts (default: another one each time)")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args(arguments)
    if min(*options.streams, options.output_tokens, options.prompt_tokens, 1) < 1:
        parser.error("streams and tokens must be at least 1")
    if not 0 <= options.shared_prefix < options.prompt_tokens:
        parser.error("--shared-prefix is a part of --prompt-tokens")
    if not 0 <= options.token_ids[0] < options.token_ids[1]:
        parser.error("--token-ids must be a range")
    if options.seed is None:  # a server that was measured before still has those prompts in its cache
        options.seed = secrets.randbelow(2**31)
    return options


async def _run_all(options: argparse.Namespace) -> list[tuple[int, Report]]:
    address = ServerAddress.parse(options.url)
    form = RequestForm(Client(address).first_model(), options.chat)
    workload = Workload(
        Lengths(options.prompt_tokens - options.shared_prefix, options.output_tokens),
        options.seed,
        None if options.chat else range(*options.token_ids),
        options.shared_prefix,
    )
    warm_up = Report.of(*await run_sessions(address, form, [workload.session(0)], Pace(1)))
    if warm_up.failures:
        raise CommandError(f"the first request failed: {next(iter(warm_up.failures))}")
    results: list[tuple[int, Report]] = []
    first = 1  # numbers are never used twice, so no run finds the prompts of another in the cache
    for streams in options.streams:
        num_requests = options.requests or 4 * streams
        sessions = [workload.session(number) for number in range(first, first + num_requests)]
        results.append((streams, Report.of(*await run_sessions(address, form, sessions, Pace(streams)))))
        first += num_requests
    return results


def main(arguments: Sequence[str]) -> int:
    """Runs, prints, writes; the exit status."""
    options = parse_arguments(arguments)
    try:
        results = asyncio.run(_run_all(options))
    except (CommandError, OSError) as error:
        print(f"{options.url}: {error}", file=sys.stderr)
        return 1
    print(table(results))
    failures = [(streams, *failure) for streams, report in results for failure in report.failures.items()]
    for streams, reason, count in failures:
        print(f"{streams} streams: {count} x {reason}", file=sys.stderr)
    if options.out is not None:
        workload = {name: value for name, value in vars(options).items() if name != "out"}
        runs = [{"streams": streams, **dataclasses.asdict(report)} for streams, report in results]
        content = {**provenance(), "workload": workload, "runs": runs}
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
