"""`tokenway bench serve`, or `tokenway bench` alone: what is asked for, run, printed and written."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.launcher.bench.report import Report
from services.launcher.bench.runner import Pace, run_sessions
from services.launcher.bench.session_files import read_sessions
from services.launcher.bench.sessions import RequestForm, Session
from services.launcher.bench.workloads import Lengths, Workload
from services.launcher.command_parser import command_parser
from services.launcher.errors import CommandError
from services.launcher.http.client import Client
from services.launcher.http.server_address import ServerAddress
from services.launcher.server_flags import add_server_flags, server_address

_DEFAULT_CONCURRENCY = 8
_WARM_UP = -1  # session numbers of the warm-up lie below those of the run, so that it leaves no prefix in the cache
_WORKLOADS = ("random", "shared-prefix", "multi-turn", "jsonl")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command_parser(
        "bench",
        "Measures a running server under load: closed loop, or requests that arrive at random times. `tokenway bench "
        "serve` is the same; `tokenway bench kernels` and `tokenway bench engine` measure a worker without a server.",
        "tokenway bench --workload shared-prefix --prefix-tokens 512 --concurrency 16 --out run.json",
        ". Status: 0 when every answer was as it must be, 1 when one was not, 2 when nothing could be measured.",
    )
    add_server_flags(made, "http://127.0.0.1:8000")
    made.add_argument("--model", default="", help="name to ask for (default: the first that the server lists)")
    made.add_argument("--endpoint", choices=("completions", "chat"), help="route (default: chat for multi-turn and "
                      "jsonl, completions for the others)")  # fmt: skip
    made.add_argument("--workload", choices=_WORKLOADS, default="random", help="what is sent (default random)")
    made.add_argument("--file", type=Path, help="prompts of the workload jsonl: simple lines, messages, or ShareGPT")
    made.add_argument("--num-prompts", type=int, default=64, help="requests; of multi-turn: conversations (default 64)")
    made.add_argument("--input-tokens", type=int, default=128, help="ids of a prompt, or words (default 128)")
    made.add_argument("--output-tokens", type=int, default=128, help="of an answer (default 128)")
    made.add_argument("--range-ratio", type=float, default=0.0, help="lengths drawn from 1-R to 1+R times (default 0)")
    made.add_argument("--prefix-tokens", type=int, default=512, help="shared by prompts of shared-prefix (default 512)")
    made.add_argument("--num-prefixes", type=int, default=1, help="different shared prefixes (default 1)")
    made.add_argument("--turns", type=int, default=4, help="of each conversation of multi-turn (default 4)")
    made.add_argument("--words", action="store_true", help="prompts of words instead of token ids on completions")
    made.add_argument("--token-ids", type=int, nargs=2, default=[1000, 30000], metavar=("FROM", "TO"),
                      help="range of ids to draw from (default 1000 30000)")  # fmt: skip
    made.add_argument("--concurrency", type=int, help=f"at once (default {_DEFAULT_CONCURRENCY}; with a rate: no cap)")
    made.add_argument("--request-rate", type=float, help="Poisson arrivals a second instead of a closed loop")
    made.add_argument("--warm-up", type=int, default=1, help="requests before the run, not counted (default 1)")
    made.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers of exactly the length asked for, from servers that know ignore_eos (default)",
    )
    made.add_argument("--extra-body", default="{}", metavar="JSON", help="fields added to every request")
    made.add_argument("--seed", type=int, help="of everything drawn (default: another one each time, so that no run "
                      "finds the prompts of an earlier one in a cache)")  # fmt: skip
    made.add_argument("--out", type=Path, metavar="FILE", help="write options and figures as JSON")
    return made


def run(arguments: Sequence[str]) -> int:
    """Runs, prints, writes; the exit status.

    Raises:
        CommandError: nothing could be measured; one line.
    """
    options = parser().parse_args(arguments)
    _check(options)
    options.seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    address = server_address(options)
    form = _form(options, address)
    sessions, warm_up = _sessions(options, form)
    pace = Pace(options.concurrency, options.request_rate, options.seed)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report = asyncio.run(_measure(address, form, sessions, warm_up, pace))
    if report.num_failed < report.requests:
        print(report.table())
    if options.out is not None:
        _write(options, {"date": started, "url": address.url, "model": form.model, **dataclasses.asdict(report)})
    for reason, count in report.failures.items():
        print(f"tokenway: {count} x {reason}", file=sys.stderr)
    if report.num_failed == report.requests:
        print(f"tokenway: none of {report.requests} requests succeeded: nothing was measured", file=sys.stderr)
    return 1 if report.failures else 0


def _check(options: argparse.Namespace) -> None:
    for name in ("num_prompts", "input_tokens", "output_tokens", "num_prefixes", "turns"):
        if getattr(options, name) < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("prefix_tokens", "warm_up"):
        if getattr(options, name) < 0:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 0")
    if not 0 <= options.range_ratio < 1:
        raise CommandError("--range-ratio must be between 0 and 1")
    if not 0 <= options.token_ids[0] < options.token_ids[1]:
        raise CommandError("--token-ids must be a range of ids")
    if options.concurrency is not None and options.concurrency < 1:
        raise CommandError("--concurrency must be at least 1")
    if options.request_rate is not None and not 0 < options.request_rate < float("inf"):
        raise CommandError("--request-rate must be above 0")
    if (options.workload == "jsonl") != (options.file is not None):
        raise CommandError("--workload jsonl and --file belong together")
    if options.request_rate is None and options.concurrency is None:
        options.concurrency = _DEFAULT_CONCURRENCY


def _form(options: argparse.Namespace, address: ServerAddress) -> RequestForm:
    try:
        extra = json.loads(options.extra_body)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise CommandError("--extra-body must be a JSON object")
    is_chat = options.endpoint == "chat" or (options.endpoint is None and options.workload in ("multi-turn", "jsonl"))
    return RequestForm(options.model or Client(address).first_model(), is_chat, options.ignore_eos, extra)


def _sessions(options: argparse.Namespace, form: RequestForm) -> tuple[list[Session], list[Session]]:
    """What is measured, and what is sent before."""
    is_words = form.is_chat or options.words or options.workload in ("multi-turn", "jsonl")
    made_up = Workload(
        Lengths(options.input_tokens, options.output_tokens, options.range_ratio),
        options.seed,
        None if is_words else range(*options.token_ids),
        options.prefix_tokens if options.workload == "shared-prefix" else 0,
        options.num_prefixes,
        options.turns if options.workload == "multi-turn" else 1,
    )
    plain = dataclasses.replace(made_up, prefix_tokens=0, num_turns=1)
    warm_up = [plain.session(_WARM_UP - number) for number in range(options.warm_up)]
    if options.workload == "jsonl":
        return read_sessions(options.file, options.output_tokens, options.num_prompts), warm_up
    return [made_up.session(number) for number in range(options.num_prompts)], warm_up


async def _measure(
    address: ServerAddress, form: RequestForm, sessions: Sequence[Session], warm_up: Sequence[Session], pace: Pace
) -> Report:
    if warm_up:
        answers, _ = await run_sessions(address, form, warm_up, Pace(1))
        failure = next((answer.failure for answer in answers if answer.failure), "")
        if failure:
            raise CommandError(f"{address.url}: the warm-up failed: {failure}")
    return Report.of(*await run_sessions(address, form, sessions, pace))


def _write(options: argparse.Namespace, figures: Mapping[str, Any]) -> None:
    hidden = ("out", "api_key", "url", "model")
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    content = {"options": {name: value for name, value in asked.items() if name not in hidden}, **figures}
    options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
