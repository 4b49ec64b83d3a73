"""A running scheduler in a thread, and peers on real sockets that the test drives by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import zmq

from services.runtime.config import Settings
from services.runtime.service import Process
from services.runtime.session import SchedulerSession
from services.scheduler.service import SchedulerService
from services.wire.answers import DecodeOpen, TokensProduced
from services.wire.columns import pack_int32, split_by_counts, unpack_int32, unpack_request_ids
from services.wire.endpoints import Identity
from services.wire.finish import Finish
from services.wire.members import Role, State, Telemetry, WorkerCard
from services.wire.requests import Acknowledge, Load, Submit
from services.wire.samples import unpack_samples
from services.wire.steps import StepPlan
from services.wire.transport import BlockingReceiver, DealerPort
from tests.unit.scheduler.fake_worker import VOCAB_SIZE, FakeWorker

PATIENCE_S = 20.0
_NOTICED_S = 0.3
M = TypeVar("M")


@dataclass
class Peer:
    """One process of the group, as far as the scheduler can tell."""

    identity: Identity
    port: DealerPort
    session: SchedulerSession
    received: list[object] = field(default_factory=list)
    on_message: Callable[[object], None] | None = None
    is_talking: bool = True

    def send(self, message: object) -> None:
        """Sends a message to the scheduler."""
        assert self.port.send(message)

    def of(self, kind: type[M]) -> list[M]:
        """The messages of one type that it got."""
        return [message for message in self.received if isinstance(message, kind)]


@dataclass
class StreamedAnswer:
    """What a detokenizer got of one answer."""

    token_ids: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    cached_tokens: int = 0


class Group:
    """The scheduler's thread and its peers; `pump` is the only thing that makes time pass for the peers."""

    def __init__(self, folder: Path, **settings: object) -> None:
        values: dict[str, object] = {"run_dir": str(folder), "plans_ahead": 1, "drain_timeout_s": 5.0}
        self.settings = Settings(**(values | settings))  # type: ignore[arg-type]
        self.process = Process(self.settings, Identity(Role.SCHEDULER, "s"))
        self.service = SchedulerService(self.process)
        self.failure: BaseException | None = None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.peers: list[Peer] = []
        self.mute_peers: list[Peer] = []
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.service.serve()
        except Exception as error:
            self.failure = error

    def join(self, role: Role, instance: str = "a", card: WorkerCard | None = None, epoch: int | None = None) -> Peer:
        """Starts a peer; it greets at the next pump."""
        identity = Identity(role, instance) if epoch is None else Identity(role, instance, epoch)
        port = DealerPort(self.context, self.service.address, identity.routing_id)
        # A greeting before it is connected would come again half a second later.
        assert port.socket.poll(int(PATIENCE_S * 1000), zmq.POLLOUT)
        session = SchedulerSession(identity, "ipc://nowhere", dict, time.monotonic())
        session.worker_card = card
        session.set_state(State.READY, time.monotonic())
        peer = Peer(identity, port, session)
        self.peers.append(peer)
        return peer

    def leave(self, peer: Peer) -> None:
        """The peer's process dies, which the scheduler notices sooner than in earnest if it is by its silence."""
        self.peers.remove(peer)
        self.service._group.membership.peers[peer.identity.routing_id].silence_limit_s = _NOTICED_S
        peer.port.close()

    def mute(self, peer: Peer) -> None:
        """The peer hangs: it neither talks nor listens, but its socket is there."""
        self.peers.remove(peer)
        self.mute_peers.append(peer)

    def hear(self, peer: Peer, kind: type[M]) -> M:
        """The next message of a type that arrives at a mute peer's socket; the others go on."""
        found: list[M] = []

        def has_come() -> bool:
            found.extend(item.message for item in peer.port.receive_ready() if isinstance(item.message, kind))
            return bool(found)

        self.pump(has_come)
        return found[0]

    def pump(self, is_done: Callable[[], bool]) -> None:
        """Lets the peers talk until the condition holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_done():
            assert time.monotonic() < deadline_s, "the condition never came true"
            for peer in self.peers:
                if peer.is_talking:
                    for message in peer.session.messages_due(time.monotonic()):
                        peer.port.send_now(message)
            receiver = BlockingReceiver([peer.port for peer in self.peers])
            for port, envelope in receiver.receive_batch(0.02):
                peer = next(peer for peer in self.peers if peer.port is port)
                peer.received.append(envelope.message)
                if not peer.session.receive(envelope.message, time.monotonic()) and peer.on_message:
                    peer.on_message(envelope.message)

    def close(self) -> None:
        """Stops the scheduler (draining) and closes all sockets."""
        for peer in self.peers:
            if peer.identity.role is Role.TOKENIZER:  # nobody waits for an answer any more
                peer.port.send(peer.session.goodbye())
        self.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        for peer in self.peers + self.mute_peers:
            peer.port.close()
        self.context.term()

    def stop(self) -> None:
        """What SIGTERM does."""
        self.process.is_stopping = True
        if self.process.on_stop is not None:
            self.process.on_stop()


@dataclass
class Pipeline:
    """A group with one tokenizer, one detokenizer and one worker, all welcome."""

    group: Group
    tokenizer: Peer
    detokenizer: Peer
    gpu_worker: Peer
    worker: FakeWorker
    is_working: bool = True
    acknowledges: bool = True
    answers: dict[bytes, StreamedAnswer] = field(default_factory=dict)

    def take_plan(self, message: object) -> None:
        """The worker runs a plan and answers at once, unless the test holds it back."""
        if isinstance(message, StepPlan):
            self.worker.run(message)
            if self.is_working:
                self.work_off()

    def work_off(self) -> None:
        """Sends the results that were held back."""
        while self.worker.results:
            self.gpu_worker.send(self.worker.results.popleft())
            self.gpu_worker.session.progress += 1

    def take_tokens(self, message: object) -> None:
        """The detokenizer writes down what comes; nothing before its DecodeOpen, nothing lost, nothing twice."""
        if isinstance(message, DecodeOpen):
            self.answers[message.request_id] = StreamedAnswer()
        elif isinstance(message, TokensProduced):
            runs = split_by_counts(unpack_int32(message.token_ids), unpack_int32(message.counts))
            firsts, cached = unpack_int32(message.first_indexes), unpack_int32(message.cached_tokens)
            for i, request_id in enumerate(unpack_request_ids(message.request_ids)):
                answer = self.answers[request_id]
                assert answer.finish is Finish.NONE
                assert firsts[i] == len(answer.token_ids)
                answer.token_ids += runs[i]
                answer.finish = Finish(message.finishes[i])
                answer.cached_tokens = cached[i]
                if answer.finish and self.acknowledges:
                    index = pack_int32([len(answer.token_ids)])
                    self.tokenizer.send(Acknowledge(request_id, message.attempts[4 * i : 4 * i + 4], index))

    def answer(self, number: int) -> StreamedAnswer:
        """The answer of a request by its number."""
        return self.answers.get(number.to_bytes(16, "big"), StreamedAnswer())

    def finish_of(self, number: int) -> Finish:
        """Why the answer ended; NONE while it goes on."""
        return self.answer(number).finish


def worker_card(num_pages: int = 64, page_size: int = 4, **other: int) -> WorkerCard:
    """A small worker's card."""
    sizes = {"vocab_size": VOCAB_SIZE, "logits_width": VOCAB_SIZE, "max_model_len": 200, "max_rows": 8}
    sizes |= {"chunk_tokens": 16} | other
    return WorkerCard(page_size=page_size, num_pages=num_pages, chunk_ms=1.0, **sizes)  # type: ignore[arg-type]


@contextmanager
def running_group(**settings: object) -> Iterator[Group]:
    """A scheduler without peers."""
    with TemporaryDirectory(prefix="tw-") as folder:
        group = Group(Path(folder), **settings)
        try:
            yield group
        finally:
            group.close()


@contextmanager
def running_pipeline(card: WorkerCard | None = None, **settings: object) -> Iterator[Pipeline]:
    """A scheduler with one peer of each kind."""
    card = card or worker_card()
    with running_group(**settings) as group:
        tokenizer, detokenizer = group.join(Role.TOKENIZER), group.join(Role.DETOKENIZER)
        gpu_worker = group.join(Role.GPU_WORKER, card=card)
        worker = FakeWorker(card.num_pages, card.page_size, card.max_rows, card.chunk_tokens + card.max_rows)
        pipeline = Pipeline(group, tokenizer, detokenizer, gpu_worker, worker)
        gpu_worker.on_message = pipeline.take_plan
        detokenizer.on_message = pipeline.take_tokens
        group.pump(lambda: all(len(peer.session.members) == 3 for peer in group.peers))
        yield pipeline


def id_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def run_all(pipeline: Pipeline, submits: list[Submit]) -> None:
    for submit in submits:
        pipeline.tokenizer.send(submit)
    numbers = [int.from_bytes(submit.request_id, "big") for submit in submits]
    pipeline.group.pump(lambda: all(pipeline.finish_of(number) for number in numbers))


def last_load(pipeline: Pipeline) -> Load:
    loads = pipeline.tokenizer.of(Load)
    return loads[-1] if loads else Load(State.STARTING, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def counter_of(pipeline: Pipeline, name: str) -> float:
    for message in reversed(pipeline.tokenizer.of(Telemetry)):
        for member in message.members:
            for key, value in unpack_samples(member.metrics).items():
                if f"{name}_total" in key:
                    return value
    return -1.0
