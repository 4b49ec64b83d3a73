"""`tokenway chat` as a person uses it: on a real terminal, with the real model; and what is piped in."""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.integration.client import Client
from tests.integration.server import environment, running

pytestmark = [pytest.mark.slow, pytest.mark.surface, pytest.mark.timeout(300)]
PROMPT = ">>> "
PATIENCE_S = 120.0
COLUMNS = 44
ENDLESS = ["--set", "temperature=0", "--set", "max_tokens=4000", "--set", "min_tokens=4000"]


class Person:
    """Somebody at a terminal: types, waits for what must appear, presses Ctrl-C."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a read may end inside a character
        self._unread = ""

    def wait_for(self, text: str) -> str:
        """What is shown up to and with this text, without what only a terminal understands."""
        deadline_s = time.monotonic() + PATIENCE_S
        while text not in self._unread:
            assert time.monotonic() < deadline_s, f"no {text!r} in {self._unread!r}"
            if select.select([self._terminal], [], [], 1.0)[0]:
                self._unread = plain(self._unread + self._read())
        found, _, self._unread = self._unread.partition(text)
        return found + text

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def ask(self, text: str) -> str:
        """Types a line at a prompt that has been waited for; what is shown up to the next one."""
        self.type(f"{text}\n")
        return self.wait_for(PROMPT).removesuffix(PROMPT).partition("\n")[2]

    def leave(self) -> int:
        """Ctrl-D; the exit status."""
        self.type("\x04")
        return self.process.wait(60)

    def _read(self) -> str:
        try:
            piece = os.read(self._terminal, 65536)
        except OSError:  # the other end is closed
            piece = b""
        assert piece, f"it has ended: {self._unread!r}"
        return self._decode(piece)


def plain(text: str) -> str:
    """Without the codes of a terminal; what it took back of a line is taken back."""
    text = re.sub(r"\x1b\[(\d+)D\x1b\[K", lambda match: "\b" * int(match[1]), text).replace("\r\n", "\n")
    text = re.sub(r"[^\n]*\r\x1b\[K", "", text)
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r(?=.)", "", text, flags=re.DOTALL)
    while "\x08" in text:  # \b would be the edge of a word
        text = re.sub(r"(?:^|(?<=\n)|[^\x08\n])\x08", "", text, count=1)
    return text


def test_what_is_taken_back_of_a_line_is_not_shown() -> None:
    assert plain("one two-\x1b[4D\x1b[K\r\ntwo-three\x08\x08\x1b[Kx\n\x08\x08y") == "one \ntwo-thrx\ny"


@contextmanager
def person(state: Path, *arguments: str, **settings: object) -> Iterator[Person]:
    """A chat on a terminal of its own, whose Ctrl-C reaches it as a shell's would."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    variables = environment(**settings) | {"XDG_STATE_HOME": str(state), "NO_COLOR": "1", "TERM": "xterm"}
    for name in ("COLUMNS", "LINES", "OPENAI_API_KEY"):
        variables.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_OWN_TERMINAL, "chat", *arguments],
        env=variables, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Person(process, ours)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        os.close(ours)


# The terminal becomes the controlling one, so that the Ctrl-C typed into it is a signal.
_ON_OWN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from services.launcher.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Client]:
    with running(smollm2_path, num_threads=1, kv_cache_tokens=16384, served_model_name="smollm2") as started:
        yield Client(started)


def test_a_person_talks_asks_again_and_looks_at_the_numbers(server: Client, tmp_path: Path) -> None:
    with person(tmp_path, "--url", server.server.url, "--set", "temperature=0", "--set", "max_tokens=30") as chat:
        assert "smollm2 at http://127.0.0.1:" in chat.wait_for(PROMPT)
        answer = chat.ask("What is the capital of France?")
        assert "Paris" in answer
        assert all(cell_len(line) < COLUMNS for line in answer.splitlines())
        assert chat.ask("/retry") == answer
        stats = chat.ask("/stats")
        assert re.search(
            r"first token after \d+ ms; \d+ tokens; [\d.]+ tok/s; prompt \d+ tokens, \d+ of them cached", stats
        )
        assert int(re.findall(r"(\d+) of them cached", stats)[0]) >= 16  # the question again: its pages were there
        assert chat.ask("/undo") == "taken back: What is the capital of France?\n"
        assert "* smollm2" in chat.ask("/model")
        chat.type('"""\n')
        chat.wait_for("... ")
        chat.type("Say 你好 👋\n")
        chat.wait_for("... ")
        chat.type('twice.\n"""\n')
        chat.wait_for(PROMPT)
        saved = tmp_path / "saved.json"
        chat.ask(f"/save {saved}")
        messages = json.loads(saved.read_text(encoding="utf-8"))["messages"]
        assert messages[0] == {"role": "user", "content": "Say 你好 👋\ntwice."}
        assert chat.leave() == 0
    history = (tmp_path / "tokenway" / "chat_history.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(history[0]) == "What is the capital of France?"
    assert json.loads(history[-2]) == "Say 你好 👋\ntwice."


def test_what_was_typed_before_comes_back_with_the_arrow_key(server: Client, tmp_path: Path) -> None:
    for _ in range(2):
        with person(tmp_path, "--url", server.server.url, "--set", "max_tokens=4") as chat:
            chat.wait_for(PROMPT)
            if (tmp_path / "tokenway").exists():
                chat.type("\x1b[A")
                chat.wait_for("Guten Tag, 世界")
                chat.type("\n")
            else:
                chat.type("Guten Tag, 世界\n")
            chat.wait_for(PROMPT)
            assert chat.leave() == 0


def test_ctrl_c_gives_an_answer_up_the_server_frees_it_and_the_chat_goes_on(server: Client, tmp_path: Path) -> None:
    with person(tmp_path, "--url", server.server.url, *ENDLESS) as chat:
        chat.wait_for(PROMPT)
        chat.type("Count to ten thousand.\n")
        server.wait_until(lambda: server.scheduler("num_requests_running") == 1)
        chat.wait_for("\n")
        chat.wait_for(" ")  # some of the answer
        chat.type("\x03")
        chat.wait_for("given up\n")
        server.wait_until(lambda: server.scheduler("num_requests_running") == 0)
        chat.wait_for(PROMPT)
        assert chat.process.poll() is None
        chat.type("half a line\x03")
        assert "Ctrl-D leaves" in chat.wait_for(PROMPT)
        chat.ask("/set max_tokens 3")
        assert chat.ask("Hi").strip()
        assert chat.leave() == 0
    server.wait_idle()


def test_what_is_piped_in_is_asked_once_and_only_the_answer_is_printed(server: Client) -> None:
    command = [sys.executable, "-m", "services.launcher", "chat", "--url", server.server.url, "--set", "temperature=0"]
    asked = "What is the capital of France?"
    done = subprocess.run(
        command, input=f"{asked}\n", env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    whole = server.ask("/v1/chat/completions", messages=[{"role": "user", "content": asked}])
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{whole.text}\n")


def test_ctrl_c_ends_what_was_piped_in_with_130(server: Client) -> None:
    command = [sys.executable, "-m", "services.launcher", "chat", "--url", server.server.url, *ENDLESS]
    process = subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Count.")
    process.stdin.close()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    assert (process.wait(30), errors) == (130, b"")
    server.wait_idle()


def test_without_a_server_one_is_started_and_ends_with_the_chat(smollm2_path: Path, tmp_path: Path) -> None:
    with person(
        tmp_path, str(smollm2_path), "--set", "temperature=0", "--set", "max_tokens=12",
        num_threads=1, kv_cache_tokens=4096, port=1,
    ) as chat:  # fmt: skip
        chat.wait_for("starting a server for")
        shown = chat.wait_for(PROMPT)
        url = re.findall(r"at (http://127\.0\.0\.1:\d+)", shown)[0]
        assert "Paris" in chat.ask("What is the capital of France?")
        # Nobody else on this machine can use it.
        listed = subprocess.run(
            [sys.executable, "-m", "services.launcher", "chat", "--url", url], input="Hi", env=environment(),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (listed.returncode, "wants a key" in listed.stderr) == (2, True)
        assert chat.leave() == 0
    gone = subprocess.run(
        [sys.executable, "-m", "services.launcher", "chat", "--url", url], input="Hi", env=environment(),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert gone.stderr == f"tokenway: cannot reach {url}: Connection refused\n"


def test_a_server_that_cannot_start_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"no gguf")
    command = [sys.executable, "-m", "services.launcher", "chat", str(tmp_path / "broken.gguf")]
    done = subprocess.run(
        command, input="Hi", env=environment(port=1), capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not a GGUF file" in done.stderr
    assert len(done.stderr.splitlines()) == 1
