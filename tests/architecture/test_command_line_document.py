"""docs/cli.md has every command, flag and chat command as the parsers have them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from services.launcher import model_commands, render, serve, trace
from services.launcher.bench import serve as bench
from services.launcher.bench import worker_benches
from services.launcher.chat import command as chat
from services.launcher.chat.inputs import COMMANDS as CHAT_COMMANDS
from services.launcher.cli import COMMANDS
from services.launcher.doctor import command as doctor
from services.launcher.top import command as top
from tests.architecture.markdown_tables import table_after

TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
MODELS = model_commands.parser()
ACTIONS = next(action for action in MODELS._actions if isinstance(action, argparse._SubParsersAction)).choices
PARSERS = {
    "chat": chat.parser(),
    "bench": bench.parser(),
    "bench kernels": worker_benches.kernels_parser(),
    "bench engine": worker_benches.engine_parser(),
    "doctor": doctor.parser(),
    "models": MODELS,
    "models pull": ACTIONS["pull"],
    "models rm": ACTIONS["rm"],
    "render": render.parser(),
    "trace": trace.parser(),
    "top": top.parser(),
}


def rows_of(parser: argparse.ArgumentParser) -> list[list[str]]:
    """The flags and arguments of a parser as the document lists them: what is typed, and its help."""
    unlisted = (argparse._HelpAction, argparse._SubParsersAction)
    shown = [action for action in parser._actions if not isinstance(action, unlisted)]
    return [[f"`{_typed(action)}`", str(action.help)] for action in shown]


def _typed(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings)
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return name
    choices = f"{{{','.join(action.choices)}}}" if action.choices else ""
    metavar = action.metavar or choices or action.dest.upper()
    value = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    return f"{name} {value}".strip()


def section_of(command: str) -> str:
    heading = "###" if " " in command else "##"
    return TEXT.split(f"\n{heading} tokenway {command}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("command", PARSERS)
def test_the_flags_of_a_command_are_those_of_its_parser(command: str) -> None:
    assert table_after(section_of(command), "| flag | meaning |") == rows_of(PARSERS[command])


@pytest.mark.parametrize("command", PARSERS)
def test_a_command_shows_the_example_of_its_help(command: str) -> None:
    epilog = str(PARSERS[command].epilog)
    example = epilog.removeprefix("Example: ").split("; ")[0].split(". ")[0]
    assert example.startswith(f"tokenway {command}")
    assert f"\n{example}\n" in section_of(command)


def test_every_command_is_named_with_what_it_does() -> None:
    listed = {row[0]: row[1] for row in table_after(TEXT, "| command | what |")}
    assert listed == {f"`tokenway {name}`": what for name, what in COMMANDS.items()}
    assert all(f"tokenway {name}" in README for name in COMMANDS)
    assert set(COMMANDS) == {name.split()[0] for name in PARSERS} | {"serve"}
    assert serve.parser().prog == "tokenway serve"


def test_the_commands_of_a_chat_are_those_that_it_knows() -> None:
    rows = table_after(section_of("chat"), "| in a chat | what it does |")
    assert rows == [[f"`/{name} {what}`".replace(" `", "`"), text] for name, (what, text) in CHAT_COMMANDS.items()]
