"""A real tokenizer process behind which the test plays the rest of the group: a scheduler and a detokenizer."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import zmq

from services.wire.columns import pack_int32, unpack_int32, unpack_request_ids
from services.wire.endpoints import Identity, ipc_endpoint
from services.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Acknowledge,
    Admitted,
    Finish,
    Heartbeat,
    Hello,
    Load,
    Member,
    MemberTelemetry,
    Refused,
    Resend,
    Role,
    Roster,
    State,
    Submit,
    Telemetry,
    TextChunks,
    Welcome,
)
from services.wire.transport import BlockingReceiver, DealerPort, RouterPort
from tests.unit.tokenizer.http_client import Connection, Response, request, wait_until
from tests.unit.tokenizer.small_models import small_model

T = TypeVar("T")
R = TypeVar("R", Resend, Acknowledge, Abort)
DEADLINE_S = 20.0
ROOT = Path(__file__).parents[3]
CONTEXT = 8192
CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
READY_LOAD = Load(
    state=State.READY,
    num_waiting=0,
    max_waiting=64,
    num_running=0,
    free_pages=512,
    num_pages=512,
    max_total_tokens=CONTEXT,
    retry_after_s=2,
    idle_ms=0,
)

METRICS = {
    Role.SCHEDULER: {
        "\x1f".join(("counter", "tokenway:scheduler_things", "tokenway:scheduler_things_total", "kind=a b")): 5.0
    }
}


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
    columns = {
        name: b"".join(getattr(part, name) for part in parts) for name in TextChunks.__slots__ if name not in tuples
    }
    joined = {name: tuple(item for part in parts for item in getattr(part, name)) for name in tuples}
    return TextChunks(**joined, **columns)


class Backend(threading.Thread):
    """Scheduler and detokenizer in one thread; the test tells it what to send and asks what came."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.identity = Identity(Role.SCHEDULER, "s")
        self.detokenizer = Identity(Role.DETOKENIZER, "d")
        self.worker = Identity(Role.GPU_WORKER, "w")
        self.is_silent = False
        self.answers_hello = True
        self.script: Callable[[Submit], Sequence[TextChunks]] | None = None
        """When set, every Submit is admitted and answered with these batches, one message each."""
        self._load = READY_LOAD
        self._roles = [Role.SCHEDULER, Role.GPU_WORKER, Role.DETOKENIZER]
        self._states: dict[Role, State] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = RouterPort(self._context, endpoint)
        self.address = self._router.address
        self._dealers: dict[bytes, DealerPort] = {}
        self._strangers: list[DealerPort] = []
        self._commands: deque[Callable[[], object]] = deque()
        self._receiver = BlockingReceiver([self._router])
        self._arrived: list[object] = []
        self._condition = threading.Condition()
        self._is_stopping = False
        self._next_beat_s = 0.0
        self.tokenizer = b""
        """Routing id of the process under test, once it has said Hello."""
        self.hello: Hello | None = None

    # ------------------------------------------------ the thread

    def run(self) -> None:
        while not self._is_stopping:
            for _, envelope in self._receiver.receive_batch(0.05):
                self._answer(envelope.peer, envelope.message)
                with self._condition:
                    self._arrived.append(envelope.message)
                    self._condition.notify_all()
            while self._commands:
                self._commands.popleft()()
            for dealer in (*self._dealers.values(), *self._strangers):
                dealer.flush()
            now_s = time.monotonic()
            if self.tokenizer and not self.is_silent and now_s >= self._next_beat_s:
                self._next_beat_s = now_s + 0.25
                self._router.send(self.tokenizer, Heartbeat(self.identity.epoch, State.READY, 0))
                self._router.send(self.tokenizer, self._telemetry())
        for port in (self._router, *self._dealers.values(), *self._strangers):
            port.close()
        self._context.term()

    def _answer(self, peer: bytes, message: object) -> None:
        if isinstance(message, Hello) and self.answers_hello:
            self.tokenizer, self.hello = peer, message
            if peer not in self._dealers:
                self._dealers[peer] = DealerPort(self._context, message.address, self.detokenizer.routing_id)
            own = Member(message.role, message.instance, message.epoch, message.address, message.state)
            for item in (Welcome(PROTOCOL_VERSION, self.identity.epoch), self._roster(own), self._load):
                self._router.send(peer, item)
            self._router.send(peer, self._telemetry())
        elif isinstance(message, Submit) and self.script is not None:
            self._router.send(peer, Admitted(message.request_id, message.attempt))
            for batch in self.script(message):
                self._dealers[peer].send(batch)

    def _roster(self, *others: Member) -> Roster:
        members = [self._member(role) for role in self._roles]
        return Roster(1, (*members, *others))

    def _member(self, role: Role) -> Member:
        who = self._who(role)
        return Member(role, who.instance, who.epoch, "", self._states.get(role, State.READY))

    def _telemetry(self) -> Telemetry:
        return Telemetry(
            tuple(
                MemberTelemetry(
                    role,
                    who.instance,
                    who.epoch,
                    self._states.get(role, State.READY),
                    100,
                    7,
                    METRICS.get(role, {}),
                    silence_limit_ms=3000,
                )
                for role in self._roles
                for who in [self._who(role)]
            )
        )

    def _who(self, role: Role) -> Identity:
        return {Role.SCHEDULER: self.identity, Role.GPU_WORKER: self.worker, Role.DETOKENIZER: self.detokenizer}[role]

    # ------------------------------------------------ what the test says

    def do(self, command: Callable[[], object]) -> None:
        """Runs something in the thread."""
        self._commands.append(command)
        self._receiver.interrupt()

    def send(self, *items: object) -> None:
        """From the scheduler."""
        for item in items:
            self.do(lambda item=item: self._router.send(self.tokenizer, item))  # type: ignore[misc]

    def send_text(self, *batches: TextChunks) -> None:
        """From the detokenizer."""
        for batch in batches:
            self.do(lambda batch=batch: self._dealers[self.tokenizer].send(batch))  # type: ignore[misc]

    def send_raw(self, frame: bytes) -> None:
        """Bytes that are no message, from both."""
        self.do(lambda: self._router.socket.send_multipart([self.tokenizer, frame]))
        self.do(lambda: self._dealers[self.tokenizer].socket.send(frame))

    def send_as(self, routing_id: bytes, batch: object) -> None:
        """To the process under test from a peer of another name, on a socket of its own."""

        def send() -> None:
            port = DealerPort(self._context, self._dealers[self.tokenizer].endpoint, routing_id)
            self._strangers.append(port)
            port.send(batch)

        self.do(send)

    def admit(self, *submits: Submit) -> None:
        self.send(*(Admitted(submit.request_id, submit.attempt) for submit in submits))

    def refuse(self, submit: Submit, status: int, code: str, text: str = "no", param: str = "", retry: int = 0) -> None:
        self.send(Refused(submit.request_id, submit.attempt, status, code, text, param, retry))

    def tell_load(self, **changes: object) -> None:
        """Changes the load and tells it."""
        self._load = replace(self._load, **changes)  # type: ignore[arg-type]
        self.send(self._load)

    def wait_for_load(self, port: int, max_total_tokens: int) -> None:
        """Waits until the process knows the last `tell_load` (the models list shows what fits)."""
        wait_until(lambda: request(port, "GET", "/v1/models").json()["data"][0]["max_model_len"] == max_total_tokens)

    def tell_roles(self, *roles: Role) -> None:
        """The group consists of these from now on."""
        self._roles = list(roles)
        self.send(self._roster(), self._telemetry())

    def tell_state(self, role: Role, state: State) -> None:
        self._states[role] = state
        self.send(self._roster(), self._telemetry())

    # ------------------------------------------------ what the test asks

    def wait_for(self, find: Callable[[Sequence[object]], T | None], within_s: float = DEADLINE_S) -> T:
        """What `find` makes of all that has arrived, once it is not None."""
        deadline_s = time.monotonic() + within_s
        with self._condition:
            while (found := find(self._arrived)) is None:
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"in vain; last arrived: {[type(item).__name__ for item in self._arrived[-20:]]}"
                self._condition.wait(left_s)
            return found

    def arrived(self, kind: type[T]) -> list[T]:
        with self._condition:
            return [item for item in self._arrived if isinstance(item, kind)]

    def forget(self) -> None:
        """Drops all that has arrived."""
        with self._condition:
            self._arrived.clear()

    def take_submits(self, count: int = 1) -> list[Submit]:
        """The next Submits, which are then no longer there."""

        def find(arrived: Sequence[object]) -> list[Submit] | None:
            submits = [item for item in arrived if isinstance(item, Submit)]
            return submits[:count] if len(submits) >= count else None

        submits = self.wait_for(find)
        with self._condition:
            for submit in submits:
                self._arrived.remove(submit)
        return submits

    def wait_for_abort(self, submit: Submit) -> None:
        """Waits until this answer was aborted."""
        self._wait_for_row(Abort, submit, lambda item, row: True)

    def wait_for_resend(self, submit: Submit, first_index: int) -> None:
        """Waits until this answer was asked for again."""
        self._wait_for_row(Resend, submit, lambda item, row: indexes(item.first_indexes)[row] == first_index)

    def wait_for_acknowledgement(self, submit: Submit, next_index: int) -> None:
        """Waits until so many ids of this answer are acknowledged."""
        self._wait_for_row(Acknowledge, submit, lambda item, row: indexes(item.next_indexes)[row] == next_index)

    def wait_for_state(self, state: State) -> None:
        """Waits until the process has said that it is in this state."""
        self.wait_for(
            lambda arrived: any(isinstance(item, Heartbeat) and item.state is state for item in arrived) or None
        )

    def _wait_for_row(self, kind: type[R], submit: Submit, is_right: Callable[[R, int], bool]) -> None:
        def find(arrived: Sequence[object]) -> bool | None:
            for item in arrived:
                if isinstance(item, kind):
                    rows = unpack_request_ids(item.request_ids)
                    if submit.request_id in rows and is_right(item, rows.index(submit.request_id)):
                        return True
            return None

        self.wait_for(find)

    def num_aborted(self, submit: Submit) -> int:
        return sum(unpack_request_ids(item.request_ids).count(submit.request_id) for item in self.arrived(Abort))

    def stop(self) -> None:
        self._is_stopping = True
        self._receiver.interrupt()
        self.join(DEADLINE_S)


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


def indexes(column: bytes) -> list[int]:
    """An int32 column as numbers."""
    return unpack_int32(column)
