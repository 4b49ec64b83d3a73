"""Asks a process of a service's own code what the launcher may not load itself, and reads its answer.

The child runs a module of a service with that service's libraries (torch, tokenizers), prints one JSON object and ends;
one that takes long prints several, a line each, the last of them `{"done": true}`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from typing import Any

from services.launcher.errors import CommandError
from services.runtime.config import Settings, inherited_environment

_TIMEOUT_S = 300.0


def ask_child(module: str, settings: Settings, arguments: Sequence[str] = (), question: str = "") -> dict[str, Any]:
    """Runs `python -m MODULE` with these settings and gives back what it printed.

    Args:
        module: the dotted name.
        settings: reach it through its environment, as those of a service do.
        arguments: of its command line.
        question: its standard input.

    Raises:
        CommandError: it told of an error, or broke down; one line.
    """
    environment = inherited_environment() | settings.as_environment()
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments], input=question, env=environment, capture_output=True,
            text=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise CommandError(f"{module} did not answer within {_TIMEOUT_S:.0f} s") from None
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()
        raise CommandError(f"{module} failed: {said[-1]}") from None
    if "error" in found:
        raise CommandError(str(found["error"]))
    return dict(found)


def follow_child(module: str, settings: Settings, arguments: Sequence[str]) -> Generator[dict[str, Any], None, None]:
    """Runs `python -m MODULE` as `ask_child` does and gives what it prints, object after object, as it comes.

    To be read to its end, or closed: that ends the child.

    Raises:
        CommandError: it told of an error, or broke down; one line.
    """
    environment = inherited_environment() | settings.as_environment()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as problems:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=problems, text=True, encoding="utf-8",
        )  # fmt: skip
        try:
            assert child.stdout is not None
            for line in child.stdout:
                told = json.loads(line)
                if "error" in told:
                    raise CommandError(str(told["error"]))
                if "done" in told:
                    return
                yield told
            status = child.wait()
            problems.seek(0)
            said = problems.read().strip().splitlines() or [f"status {status}"]
            raise CommandError(f"{module} failed: {said[-1]}")
        except ValueError:
            raise CommandError(f"{module} said what is not understood: {line.strip()[:80]!r}") from None
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
