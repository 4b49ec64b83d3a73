"""`tokenway bench kernels` and `tokenway bench engine`: a worker measured in a child process, without a server."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from services.launcher.bench.summary import markdown_table
from services.launcher.child_questions import follow_child
from services.launcher.command_parser import command_parser
from services.launcher.errors import CommandError
from services.launcher.models import model_on_disk
from services.launcher.running_status import RunningStatus
from services.launcher.terminal import Terminal
from services.runtime.config import Settings, load_settings

_CHILD = "services.gpu_worker.bench"
_MOST_ROWS, _MOST_TOKENS = 8192, 2**20


def kernels_parser() -> argparse.ArgumentParser:
    """The command line of `bench kernels`, less the settings of a server, which are taken too."""
    made = command_parser(
        "bench kernels",
        "Times the kernels of a model's steps one by one, beside what this machine can do: products by form and rows, "
        "attention by rows and context, norm and gate, sampling. Of the model only the configuration is read.",
        "tokenway bench kernels smollm2:135m --rows 1 16 --contexts 512",
        usage="tokenway bench kernels [-h] [MODEL] [flags] [settings of `tokenway serve`]",
    )
    made.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N",
                      help="rows of a product, of a decode (default 1 4 16 64)")  # fmt: skip
    made.add_argument("--contexts", type=int, nargs="+", default=[256, 2048], metavar="N",
                      help="tokens that rows attend to (default 256 2048)")  # fmt: skip
    made.add_argument("--seconds", type=float, default=0.05, help="of each kernel (default 0.05)")
    _add_output(made)
    return made


def engine_parser() -> argparse.ArgumentParser:
    """The command line of `bench engine`, less the settings of a server, which are taken too."""
    made = command_parser(
        "bench engine",
        "Times a worker's steps without scheduler and HTTP: prompts in chunks, then decodes of all rows together.",
        "tokenway bench engine smollm2:135m --rows 1 16 --context 256",
        usage="tokenway bench engine [-h] [MODEL] [flags] [settings of `tokenway serve`]",
    )
    made.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32], metavar="N",
                      help="rows that decode together (default 1 16 32)")  # fmt: skip
    made.add_argument("--context", type=int, default=256, metavar="N", help="tokens of each prompt (default 256)")
    made.add_argument("--steps", type=int, default=32, metavar="N", help="decodes that are timed (default 32)")
    made.add_argument("--sampling", choices=("greedy", "drawn"), default="greedy",
                      help="drawn: temperature 0.7, top_p 0.9, seeds (default greedy)")  # fmt: skip
    _add_output(made)
    return made


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print machine and rows as JSON")


def run(what: str, arguments: Sequence[str]) -> int:
    """Measures and prints; the exit status.

    Args:
        what: `kernels` or `engine`.
        arguments: the rest of the command line.

    Raises:
        CommandError, SettingsError: it cannot be measured; one line.
    """
    options, rest = (kernels_parser() if what == "kernels" else engine_parser()).parse_known_args(arguments)
    settings = _with_model(load_settings(rest))
    words = _kernel_words(options) if what == "kernels" else _engine_words(options)
    machine, rows = _measure(what, settings, words)
    if options.json:
        print(json.dumps({"machine": machine, "rows": rows}, ensure_ascii=False))
        return 0
    print(_machine_line(machine))
    print(kernel_table(rows) if what == "kernels" else engine_table(rows))
    return 0


def _with_model(settings: Settings) -> Settings:
    path = model_on_disk(settings.model, settings)
    if path is None:
        raise CommandError(f"model {settings.model} is not on this disk: `tokenway models pull {settings.model}`")
    return dataclasses.replace(settings, model=str(path))


def _kernel_words(options: argparse.Namespace) -> list[str]:
    _check("--rows", options.rows, _MOST_ROWS)
    _check("--contexts", options.contexts, _MOST_TOKENS)
    if not 0 < options.seconds <= 60:
        raise CommandError("--seconds must be above 0 and at most 60")
    return ["kernels", *_numbers("--rows", options.rows), *_numbers("--contexts", options.contexts),
            "--seconds", str(options.seconds)]  # fmt: skip


def _engine_words(options: argparse.Namespace) -> list[str]:
    _check("--rows", options.rows, _MOST_ROWS)
    _check("--context", [options.context], _MOST_TOKENS)
    _check("--steps", [options.steps], _MOST_TOKENS)
    return ["engine", *_numbers("--rows", options.rows), "--context", str(options.context),
            "--steps", str(options.steps), "--sampling", options.sampling]  # fmt: skip


def _check(flag: str, values: Sequence[int], most: int) -> None:
    if not all(1 <= value <= most for value in values):
        raise CommandError(f"{flag} must be between 1 and {most}")


def _numbers(flag: str, values: Sequence[int]) -> list[str]:
    return [flag, *map(str, values)]


def _measure(what: str, settings: Settings, words: Sequence[str]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    machine: Mapping[str, Any] = {}
    rows: list[Mapping[str, Any]] = []
    with RunningStatus(Terminal(sys.stderr)) as status:
        status.show("starting" if what == "kernels" else "starting a worker")
        for line in follow_child(_CHILD, settings, words):
            machine = line.get("machine", machine)
            if "row" in line:
                rows.append(line["row"])
            if "now" in line:
                status.show(f"{len(rows)} measured: {line['now']}" if rows else str(line["now"]))
    return machine, rows


def _machine_line(machine: Mapping[str, Any]) -> str:
    where = f"{machine['name']}, {machine['threads']} threads" if machine["device"] == "cpu" else machine["name"]
    return (
        f"{where}: limits {machine['bytes_per_s'] / 1e9:,.1f} GB/s from memory, "
        f"{machine['operations_per_s'] / 1e9:,.0f} GFLOP/s of {machine['dtype']} products\n"
    )


def kernel_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each kernel, form, number of rows and context: of its times median, least and quartiles."""
    header = ("kernel", "form", "rows", "context", "us", "least", "quartiles", "GB/s", "GFLOP/s", "of limit", "bound")
    return markdown_table(
        header,
        [
            (
                row["kernel"],
                row["form"],
                str(row["rows"]),
                str(row["context"] or "-"),
                f"{row['us']:,.1f}",
                f"{row['us_least']:,.1f}",
                " to ".join(f"{quartile:,.1f}" for quartile in row["us_quartiles"]),
                *_rates(row),
            )
            for row in rows
        ],
    )


def engine_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each stage and number of rows."""
    header = ("stage", "rows", "context", "tokens/s", "step / forward", "GB/s", "GFLOP/s", "of limit", "bound")
    return markdown_table(
        header,
        [
            (row["stage"], str(row["rows"]), str(row["context"]), f"{row['tokens_per_s']:,.1f}",
             f"{row['step_over_forward']:.3f}", *_rates(row))
            for row in rows
        ],
    )  # fmt: skip


def _rates(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['bytes_per_s'] / 1e9:,.2f}",
        f"{row['operations_per_s'] / 1e9:,.1f}",
        f"{row['share']:.0%}",
        row["bound"],
    )
