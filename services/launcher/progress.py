"""What the launcher shows while a group starts: what it starts, then where it listens and what to try.

The processes' own log lines pass in between: the worker's tell how far the weights are.
"""

from __future__ import annotations

import http.client
import json
import re
import shlex
import ssl
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

_LOOK_INTERVAL_S = 0.2
_ANSWER_TIMEOUT_S = 10.0  # the first look at a model that is up has it make a token
_QUESTION = "What is the capital of France?"

READY = re.compile(r"ready after \S+ s: listening on (https?://\S+)")
"""The line that tells whoever reads a server's output where it listens."""


def show(text: str) -> None:
    """Prints a line for the person who started the server; nothing depends on its being read."""
    with suppress(OSError):
        print(text, flush=True)


@dataclass(frozen=True)
class Entrance:
    """Where the tokenizers will listen, and what a client needs.

    Attributes:
        host: As it was given.
        port: Never 0.
        is_encrypted: HTTPS.
        needs_key: Whether only a key opens more than whether the server is ready.
        model: The served name, for the example; "" when the model's files are to tell, then it is left out.
    """

    host: str
    port: int
    is_encrypted: bool = False
    needs_key: bool = False
    model: str = ""


class HttpStartup:
    """Asks the group's tokenizers whether they are ready, and says so once.

    It asks in a thread of its own, so that the supervisor answers a signal at once while a check is under way.
    """

    def __init__(self, entrance: Entrance, names: Sequence[str]) -> None:
        """Names are those of the children that are started."""
        self.url = local_url(entrance.host, entrance.port, is_encrypted=entrance.is_encrypted)
        self._entrance = entrance
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
            if self._is_ready():
                if not self._cancelled.is_set():
                    show(_welcome(self.url, self._entrance, time.monotonic() - self._started_s))
                return

    def _is_ready(self) -> bool:
        connection = self._connection()
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False  # not listening yet: asked again
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        address = self.url.partition("://")[2]
        if not self._entrance.is_encrypted:
            return http.client.HTTPConnection(address, timeout=_ANSWER_TIMEOUT_S)
        # The certificate is for the server's public name, not for this way to it; nothing secret is said here.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(address, timeout=_ANSWER_TIMEOUT_S, context=context)


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


def local_url(host: str, port: int, *, is_encrypted: bool = False) -> str:
    """Where a client on this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if is_encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _welcome(url: str, entrance: Entrance, seconds: float) -> str:
    # Small models ramble when they sample; temperature 0 shows the same good answer to everybody.
    messages = [{"role": "user", "content": _QUESTION}]
    model = {"model": entrance.model} if entrance.model else {}
    body = {**model, "messages": messages, "temperature": 0, "stream": True}
    insecure = " -k" * entrance.is_encrypted
    key = " -H 'Authorization: Bearer YOUR_KEY'" * entrance.needs_key
    return (
        f"ready after {seconds:.1f} s: listening on {url}\n"
        f"Try:\n"
        f"  curl -N{insecure} {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
        + ("\nCtrl-C stops it." if sys.stdin.isatty() else "")
    )
