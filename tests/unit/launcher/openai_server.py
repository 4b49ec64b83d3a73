"""Another server of the OpenAI API, as small as one can be: what the commands must work with besides our own."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class OpenAiServer:
    """What it answers and what it was asked.

    Each chat is answered with the words of `words` as one chunk each; `refusal` takes the place of an answer, and
    `breaks_after` closes the connection after so many chunks.
    """

    url: str = ""
    models: Sequence[str] = ("model-a", "model-b")
    words: Sequence[str] = ("Hello", " 世界", " 👋🏽", "!")
    refusal: tuple[int, str] | None = None
    breaks_after: int | None = None
    usage: dict[str, Any] = field(default_factory=lambda: {"prompt_tokens": 9, "completion_tokens": 4})
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    other: dict[str, object] = field(default_factory=dict)
    """More paths and the bodies that they answer with: JSON, or a text as it is."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server_state: OpenAiServer

    def do_GET(self) -> None:
        state = self.server_state
        state.headers.append({name.lower(): value for name, value in self.headers.items()})
        if state.refusal is not None:
            self._send(state.refusal[0], {"error": {"message": state.refusal[1]}})
        elif self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": name} for name in state.models]})
        elif self.path in state.other:
            self._send(200, state.other[self.path])
        else:
            self._send(404, {"error": {"message": f"there is no {self.path} here"}})

    def do_POST(self) -> None:
        state = self.server_state
        state.headers.append({name.lower(): value for name, value in self.headers.items()})
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state.asked.append(body)
        if state.refusal is not None:
            self._send(state.refusal[0], {"error": {"message": state.refusal[1]}})
        elif self.path in state.other:
            self._send(200, state.other[self.path])
        else:
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        """Ends with the connection, as servers without chunks do."""
        state = self.server_state
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in state.words[: state.breaks_after]:
            key: dict[str, object] = {"text": word} if "prompt" in body else {"delta": {"content": word}}
            self._event({"choices": [{"index": 0, "finish_reason": None, **key}]})
        if state.breaks_after is not None:
            self._event({"error": {"message": "the engine has died"}})
            return
        key = {"text": ""} if "prompt" in body else {"delta": {}}
        self._event({"choices": [{"index": 0, "finish_reason": "length", **key}]})
        self._event({"choices": [], "usage": state.usage})
        self.wfile.write(b"data: [DONE]\r\n\r\n")

    def _event(self, value: object) -> None:
        self.wfile.write(b"data: %b\r\n\r\n" % json.dumps(value).encode())

    def _send(self, status: int, value: object) -> None:
        content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing: tests look at what was asked."""


@contextmanager
def openai_server() -> Iterator[OpenAiServer]:
    """A server that runs meanwhile."""
    state = OpenAiServer()
    handler = type("Handler", (_Handler,), {"server_state": state})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
