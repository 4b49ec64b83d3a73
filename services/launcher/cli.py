"""The command `tokenway`: says which commands there are and hands over to one. It loads nothing that others need."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence

from services.launcher.errors import CommandError
from services.runtime.config import SettingsError

EXIT_BAD_START = 2
EXIT_INTERRUPTED = 130
EXIT_READER_LEFT = 141  # as of a program that the signal of a broken pipe ends

COMMANDS = {
    "serve": "start a server",
    "chat": "talk with a model in the terminal",
    "bench": "measure a running server under load, or a worker's kernels and steps without one",
    "doctor": "check this machine, a model and the server's peers, and say how to mend what is wrong",
    "models": "list, fetch and remove models",
    "render": "show the prompt that messages become, text and ids",
    "trace": "show where a request spent its time",
    "top": "show the stages of a running server live, beside what the machine can do",
}


def main(arguments: Sequence[str] | None = None, on_loaded: Callable[[], object] = lambda: None) -> int:
    """Runs one command.

    Args:
        arguments: the words after the program's name; those of this process when None.
        on_loaded: called when the command's modules are loaded, before it runs.

    Returns:
        The exit status: 0, 1 after a failure, 2 for a bad start, 130 after Ctrl-C, 141 when its reader has left.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments), on_loaded)
        finally:
            sys.stdout.flush()  # here, where it can be answered for, and not when the process is gone
    except BrokenPipeError:
        if not _left_streams():
            raise
        for stream in _left_streams():  # what still waits there is thrown away
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        return EXIT_READER_LEFT


def _left_streams() -> list[int]:
    """The files of standard output and error that nobody reads any more."""
    poll = select.poll()
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            poll.register(stream.fileno(), 0)  # errors are told of whatever is asked
    return [file for file, _ in poll.poll(0)]


def _run(words: Sequence[str], on_loaded: Callable[[], object]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"tokenway {_version()}")
        return 0
    try:
        command = _command(words[0])
        on_loaded()
        return command(words[1:])
    except (CommandError, SettingsError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _left_streams():
            raise
        return _bad_start(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if not isinstance(error, _start_errors()):
            raise
        return _bad_start(error)


def _command(name: str) -> Callable[[Sequence[str]], int]:
    """The function that runs a command; each loads its own modules only."""
    match name:
        case "serve":
            from services.launcher import serve

            return serve.run
        case "chat":
            from services.launcher.chat import command as chat

            return chat.run
        case "bench":
            from services.launcher.bench import command as bench

            return bench.run
        case "doctor":
            from services.launcher.doctor import command as doctor

            return doctor.run
        case "models":
            from services.launcher import model_commands

            return model_commands.run
        case "render":
            from services.launcher import render

            return render.run
        case "trace":
            from services.launcher import trace

            return trace.run
        case "top":
            from services.launcher.top import command as top

            return top.run
    raise CommandError(f"there is no command {name!r}; there are {', '.join(COMMANDS)}")


def _start_errors() -> tuple[type[Exception], ...]:
    """What the modules of a server raise before it serves; loaded only when something was raised."""
    from services.runtime.service import StartError
    from services.wire.errors import WireError

    return (StartError, WireError)


def _bad_start(error: Exception) -> int:
    print(f"tokenway: {error}", file=sys.stderr)
    return EXIT_BAD_START


def _help() -> str:
    parser = argparse.ArgumentParser(
        prog="tokenway",
        usage="tokenway [-h] [--version] COMMAND ...",
        description="Serves large language models, and talks to servers of the OpenAI API.",
        epilog="`tokenway COMMAND --help` shows a command's flags and an example.",
    )
    commands = parser.add_argument_group("commands")
    for name, what in COMMANDS.items():
        commands.add_argument(name, help=what)
    return parser.format_help().rstrip()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tokenway")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"
