"""A reader that leaves (`tokenway ... | head`) ends the command without a word, whatever it was about to print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.launcher.cli import EXIT_BAD_START, EXIT_READER_LEFT
from tests.unit.launcher.openai_server import openai_server
from tests.unit.launcher.test_trace import TRACE

_ROOT = Path(__file__).parents[3]


def run(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A command whose standard output nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            [sys.executable, "-m", "services.launcher", *arguments],
            cwd=_ROOT, stdout=writing, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60, check=False,
            env=os.environ | environment,
        )  # fmt: skip
    finally:
        os.close(writing)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["models", "--help"], ["trace", "--help"]])
def test_help_ends_without_a_word(arguments: list[str], unbuffered: str) -> None:
    done = run(arguments, PYTHONUNBUFFERED=unbuffered)
    assert done.stderr == b""
    assert done.returncode in (0, EXIT_READER_LEFT)  # the library's own help asks nobody whether it was read


def test_what_lists_and_checks_ends_without_a_word(smollm2_path: Path, tmp_path: Path) -> None:
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": "Hi"}]))
    for arguments in (
        ["models", "--models-dir", str(tmp_path)],
        ["doctor", "/no/such/model", "--port", "0"],
        ["render", str(messages), "--model", str(smollm2_path), "--json"],
    ):
        done = run(arguments)
        assert (done.returncode, done.stderr) == (EXIT_READER_LEFT, b""), arguments


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_trace_ends_without_a_word(flags: list[str]) -> None:
    with openai_server() as server:
        server.other["/trace/chatcmpl-1"] = TRACE
        done = run(["trace", "chatcmpl-1", "--url", server.url, *flags])
    assert (done.returncode, done.stderr) == (EXIT_READER_LEFT, b"")


def test_other_failures_are_told_as_before() -> None:
    done = run(["trace", "chatcmpl-1", "--url", "http://127.0.0.1:1"])
    assert done.returncode == EXIT_BAD_START
    assert done.stderr.startswith(b"tokenway: ")
