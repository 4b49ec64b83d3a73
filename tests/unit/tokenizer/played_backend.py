"""The group as a tokenizer process meets it: a scheduler and a detokenizer that say what a test tells them to."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import zmq

from services.wire.answers import HopReport, TextChunks
from services.wire.columns import unpack_int32, unpack_request_ids
from services.wire.endpoints import Identity
from services.wire.members import Heartbeat, Hello, Member, MemberTelemetry, Role, Roster, State, Telemetry, Welcome
from services.wire.messages import PROTOCOL_VERSION
from services.wire.requests import Abort, Acknowledge, Admitted, Load, Refused, Resend, Submit
from services.wire.samples import pack_samples
from services.wire.transport import BlockingReceiver, DealerPort, RouterPort
from tests.sockets import DEADLINE_S, wait_until
from tests.unit.tokenizer.http_client import request

T = TypeVar("T")
R = TypeVar("R", Resend, Acknowledge, Abort)
CONTEXT = 8192
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
    max_open=2048,
)

METRICS = {
    Role.SCHEDULER: {
        "\x1f".join(("counter", "tokenway:scheduler_things", "tokenway:scheduler_things_total", "kind=a b")): 5.0
    }
}


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
                self._router.send(self.tokenizer, self._load)  # a process that thought us lost has forgotten it
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
                    pack_samples(METRICS.get(role, {})),
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

    def send_text(self, *batches: TextChunks | HopReport) -> None:
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


def indexes(column: bytes) -> list[int]:
    """An int32 column as numbers."""
    return unpack_int32(column)
