"""A real tokenizer process behind which the test plays the rest of the group (`played_backend`)."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.wire.answers import TextChunks
from services.wire.columns import pack_int32
from services.wire.endpoints import ipc_endpoint
from services.wire.finish import Finish
from services.wire.members import State
from services.wire.requests import Submit
from tests.sockets import DEADLINE_S, wait_until
from tests.unit.tokenizer.http_client import Connection, EventReader, Json, Response, request
from tests.unit.tokenizer.played_backend import CONTEXT, READY_LOAD, Backend
from tests.unit.tokenizer.small_models import small_model

__all__ = ["CONTEXT", "READY_LOAD", "Server", "admitted_stream", "chunk", "join", "takes_requests", "write_small_model"]

ROOT = Path(__file__).parents[3]
CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def write_small_model(folder: Path, template: str | None = CHATML) -> Path:
    """A GGUF file with a tokenizer of bytes: id = byte value, then control tokens from 256 up."""
    small_model(folder, template)
    return folder / "small.gguf"


def chunk(
    submit: Submit,
    first_index: int,
    ids: Sequence[int],
    offset: int,
    text: str,
    finish: Finish = Finish.NONE,
    cached: int = 0,
    attempt: int = 0,
) -> TextChunks:
    """A batch of one row."""
    return TextChunks(
        request_ids=submit.request_id,
        attempts=pack_int32([attempt]),
        first_indexes=pack_int32([first_index]),
        counts=pack_int32([len(ids)]),
        token_ids=pack_int32(ids),
        text_offsets=pack_int32([offset]),
        texts=(text,),
        finishes=bytes([finish]),
        completion_tokens=pack_int32([first_index + len(ids) if finish else 0]),
        cached_tokens=pack_int32([cached]),
        stops=("a stop",) if finish is Finish.STOP_STRING else (),
    )


def join(batches: Iterable[TextChunks]) -> TextChunks:
    """The rows of several batches in one."""
    parts = list(batches)
    tuples = ("texts", "stops")
    columns: dict[str, Any] = {
        name: b"".join(getattr(part, name) for part in parts) for name in TextChunks.__slots__ if name not in tuples
    }
    columns |= {name: tuple(item for part in parts for item in getattr(part, name)) for name in tuples}
    return TextChunks(**columns)


def admitted_stream(backend: Backend, connection: Connection, path: str, body: Json) -> tuple[Submit, EventReader]:
    """Asks for a stream of one answer, which the scheduler admits: what was submitted, and the reader of events."""
    connection.send("POST", path, body)
    (submit,) = backend.take_submits()
    backend.admit(submit)
    return submit, EventReader(connection)


def takes_requests(port: int, **headers: str) -> bool:
    """Whether a process knows a scheduler to which it can hand requests: then it looks into their bodies."""
    return request(port, "POST", "/v1/completions", b"{", **headers).status == 400


class Server:
    """The process under test, its backend and what it logged."""

    def __init__(
        self,
        model: Path,
        *flags: str,
        is_tcp: bool = False,
        has_scheduler: bool = True,
        port: int = 0,
        is_ready: Callable[[int], bool] = takes_requests,
    ) -> None:
        """Starts it and waits; `is_ready` asks its port whether it takes requests."""
        self._folder = tempfile.TemporaryDirectory(prefix="tw-")
        self.run_dir = Path(self._folder.name)
        self.control_dir = Path(flags[flags.index("--run-dir") + 1]) if "--run-dir" in flags else self.run_dir
        self.backend = Backend("tcp://127.0.0.1:0" if is_tcp else ipc_endpoint(self.run_dir, "scheduler"))
        self.backend.answers_hello = has_scheduler
        self.backend.start()
        self.lines: list[str] = []
        self._condition = threading.Condition()
        command = [sys.executable, "-m", "services.tokenizer", "--model", str(model), "--run-dir", self._folder.name]
        options = ["--served-model-name", "small", "--max-model-len", str(CONTEXT), "--port", str(port)]
        if is_tcp:
            options += ["--scheduler-endpoint", self.backend.address]
        self.process = subprocess.Popen([*command, *options, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(self.wait_for_line("listening on").rsplit(":", 1)[1])
        if has_scheduler:
            self.backend.wait_for_state(State.READY)
            # Heartbeats come after the Load on the same link: by now requests are taken.
            wait_until(lambda: is_ready(self.port))

    def wait_for_line(self, part: str) -> str:
        """The first line of the log with this in it."""
        deadline_s = time.monotonic() + DEADLINE_S
        with self._condition:
            while not (found := [line for line in self.lines if part in line]):
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"no {part!r} in {self.lines}"
                assert self._reader.is_alive(), f"no {part!r} in {self.lines}"
                self._condition.wait(min(left_s, 0.2))
            return found[0]

    def over_control(self, method: str, path: str, body: object = None) -> Response:
        """A request over the control socket."""
        assert self.backend.hello is not None
        control = socket.socket(socket.AF_UNIX)
        control.settimeout(DEADLINE_S)
        control.connect(str(self.control_dir / f"control-{self.backend.hello.instance}.sock"))
        with Connection(self.port) as connection:
            connection.sock.close()
            connection.sock = control
            connection.send(method, path, body)
            return connection.read_response()

    def exit_status(self, within_s: float = DEADLINE_S) -> int:
        status = self.process.wait(within_s)
        self._reader.join(DEADLINE_S)
        return status

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._reader.join(DEADLINE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.backend.stop()
        self._folder.cleanup()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._condition:
                self.lines.append(line.rstrip())
                self._condition.notify_all()
