"""What the launcher shows while a group starts: what it starts, then where it listens and what to try.

The processes' own log lines pass in between: the worker's tell how far the weights are.
"""

from __future__ import annotations

import http.client
import json
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

_LOOK_INTERVAL_S = 0.2
_ANSWER_TIMEOUT_S = 10.0  # the first look at a model that is up has it make a token
_MAX_ANSWER_BYTES = 65536
_QUESTION = "What is the capital of France?"


def show(text: str) -> None:
    """Prints a line for the person who started the server; nothing depends on its being read."""
    with suppress(OSError):
        print(text, flush=True)


class HttpStartup:
    """Asks the group's tokenizers whether they are ready, and says so once.

    It asks in a thread of its own, so that the supervisor answers a signal at once while a check is under way.
    """

    def __init__(self, host: str, port: int, names: Sequence[str]) -> None:
        """Names are those of the children that are started; the address is where the tokenizers will listen."""
        self.url = _local_url(host, port)
        self._names = names
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="startup", daemon=True)

    def begin(self) -> None:
        """Starts to look. To be called when the children run: they must be started from a process of one thread."""
        self._started_s = time.monotonic()
        show(f"starting {', '.join(self._names)}")
        self._thread.start()

    def end(self) -> None:
        """Stops looking: the group is ending."""
        self._cancelled.set()

    def _watch(self) -> None:
        while not self._cancelled.wait(_LOOK_INTERVAL_S):
            status, _ = self._get("/ready")
            if status == 200:
                _, models = self._get("/v1/models")
                if not self._cancelled.is_set():
                    show(_welcome(self.url, _first_model(models), time.monotonic() - self._started_s))
                return

    def _get(self, path: str) -> tuple[int, object]:
        """Status and JSON body of a GET; (0, None) when nobody answers with one in time."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=_ANSWER_TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read(_MAX_ANSWER_BYTES))
        except (OSError, http.client.HTTPException, ValueError):
            return 0, None  # not listening yet: asked again
        finally:
            connection.close()


class SilentStartup:
    """For a role that is started alone and serves no HTTP: its own log tells."""

    def __init__(self, name: str) -> None:
        """Name is that of the one child."""
        self._name = name

    def begin(self) -> None:
        """Says what was started."""
        show(f"starting {self._name}")

    def end(self) -> None:
        """Nothing was begun that would have to end."""


def _local_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _first_model(models: object) -> str:
    match models:
        case {"data": [{"id": str(name)}, *_]}:
            return name
    return ""


def _welcome(url: str, model: str, seconds: float) -> str:
    # Small models ramble when they sample; temperature 0 shows the same good answer to everybody.
    messages = [{"role": "user", "content": _QUESTION}]
    body = {"model": model, "messages": messages, "temperature": 0, "stream": True}
    return (
        f"ready after {seconds:.1f} s: listening on {url}\n"
        f"Try:\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
        + ("\nCtrl-C stops it." if sys.stdin.isatty() else "")
    )
