"""What a person sees while the group starts: nothing too early, then a command that works."""

from __future__ import annotations

import http.server
import json
import shlex
import threading
from collections.abc import Iterator

import pytest

from services.launcher.progress import Entrance, HttpStartup

_MODEL = "qwen's 模型 🙂"


class _Tokenizer(http.server.BaseHTTPRequestHandler):
    """Not ready twice, then ready."""

    num_looks = 0

    def do_GET(self) -> None:
        if self.path == "/ready":
            type(self).num_looks += 1
            self._answer(200 if self.num_looks > 2 else 503, {"status": "ready"})
        else:
            self._answer(401, {})  # the rest may need a key

    def _answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def tokenizer() -> Iterator[tuple[int, type[_Tokenizer]]]:
    """A server on this machine: its port, and what it was asked."""
    handler = type("Tokenizer", (_Tokenizer,), {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1], handler
        server.shutdown()
        thread.join()


def _join_startup() -> None:
    for thread in threading.enumerate():
        if thread.name == "startup":
            thread.join(30)


def test_prc_10_the_address_is_shown_once_the_group_is_ready_with_a_command_that_works(
    tokenizer: tuple[int, type[_Tokenizer]], capsys: pytest.CaptureFixture[str]
) -> None:
    port, handler = tokenizer
    startup = HttpStartup(Entrance("0.0.0.0", port, model=_MODEL), ["scheduler-0", "tokenizer-0"])
    startup.begin()
    _join_startup()
    assert handler.num_looks == 3
    starting, ready, *rest = capsys.readouterr().out.splitlines()
    assert starting == "starting scheduler-0, tokenizer-0"
    assert ready.startswith("ready after ")
    assert ready.endswith(f"listening on http://127.0.0.1:{port}")
    words = shlex.split("\n".join(rest[1:3]))
    assert words[:3] == ["curl", "-N", f"http://127.0.0.1:{port}/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["temperature"], body["stream"]) == (_MODEL, 0, True)


def test_a_group_that_ends_while_it_starts_is_not_said_to_be_ready(
    tokenizer: tuple[int, type[_Tokenizer]], capsys: pytest.CaptureFixture[str]
) -> None:
    startup = HttpStartup(Entrance("127.0.0.1", tokenizer[0]), ["tokenizer-0"])
    startup.begin()
    startup.end()
    _join_startup()
    assert capsys.readouterr().out == "starting tokenizer-0\n"


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("::", "http://[::1]:80"), ("example.org", "http://example.org:80")],
)
def test_the_address_shown_is_one_that_a_client_can_use(host: str, url: str) -> None:
    assert HttpStartup(Entrance(host, 80), []).url == url
    assert HttpStartup(Entrance(host, 80, is_encrypted=True), []).url == url.replace("http:", "https:")


def test_the_command_shown_says_what_a_client_needs(
    tokenizer: tuple[int, type[_Tokenizer]], capsys: pytest.CaptureFixture[str]
) -> None:
    startup = HttpStartup(Entrance("127.0.0.1", tokenizer[0], needs_key=True, model=_MODEL), ["tokenizer-0"])
    startup.begin()
    _join_startup()
    words = shlex.split("\n".join(capsys.readouterr().out.splitlines()[3:]))
    assert "Authorization: Bearer YOUR_KEY" in words
