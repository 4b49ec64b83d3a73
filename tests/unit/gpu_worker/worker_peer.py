"""A worker, in this process or its own, and the scheduler that a test plays to it on a real socket."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from bench.random_checkpoints import Shape
from services.gpu_worker.service import main
from services.runtime.config import Settings
from services.runtime.service import Process
from services.wire.endpoints import Identity
from services.wire.members import Heartbeat, Hello, Member, Role, Roster, State, Welcome
from services.wire.messages import PROTOCOL_VERSION
from services.wire.request_params import SamplingParams
from services.wire.steps import StepPlan, StepResult
from services.wire.transport import BlockingReceiver
from tests.sockets import Sockets
from tests.unit.gpu_worker.plan_writer import PlanWriter, Request

T = TypeVar("T")
ROOT = Path(__file__).parents[3]
SHAPE = Shape(vocab_size=120, hidden_size=32, intermediate_size=48, num_layers=2, max_positions=256)
MAX_ROWS, PAGE_SIZE, POOL_TOKENS = 8, 4, 400
_HEARTBEAT_S = 0.2
_PATIENCE_S = 90.0  # a start compiles loops and a grammar starts a child, on cores that others may use too


def worker_settings(model: Path, run_dir: Path) -> Settings:
    """A small worker that starts quickly."""
    return Settings(
        model=str(model),
        device="cpu",
        run_dir=str(run_dir),
        page_size=PAGE_SIZE,
        kv_cache_tokens=POOL_TOKENS,
        max_running_requests=MAX_ROWS,
        chunked_prefill_size=64,
        num_threads=1,
        grammar_timeout_s=_PATIENCE_S,  # by the clock: a child that others keep from running is not at fault
        instance="0",
    )


def new_requests() -> list[Request]:
    """Greedy and seeded ones."""
    return [Request(n, [n, 3, n + 7], SamplingParams(n % 2 * 1.1, 0.9, 0, 0.0, n, 0)) for n in range(4)]


class TestScheduler:
    """Welcomes one worker, says that it lives while it waits, and keeps what it hears."""

    __test__ = False

    def __init__(self, sockets: Sockets, epoch: int = 7) -> None:
        self.epoch = epoch
        self.port = sockets.router()
        self.worker = b""
        self.heard: list[object] = []
        self.welcomes = True
        self._receiver = BlockingReceiver([self.port])
        self._heartbeat_s = 0.0

    def wait_for(self, kind: type[T], count: int = 1) -> list[T]:
        """The messages of a kind, once so many have been heard since the start."""
        deadline = time.monotonic() + _PATIENCE_S
        while len(found := self.all_of(kind)) < count:
            assert time.monotonic() < deadline, f"waited too long for {count} {kind.__name__}, heard {self.heard[-5:]}"
            self.turn()
        return found

    def all_of(self, kind: type[T]) -> list[T]:
        return [message for message in self.heard if isinstance(message, kind)]

    def wait_ready(self) -> Hello:
        """The greeting with the card."""
        while (hello := self.wait_for(Hello)[-1]).worker is None:
            self.wait_for(Hello, len(self.all_of(Hello)) + 1)
        return hello

    def turn(self, wait_s: float = 0.05) -> None:
        """Takes what comes, answers greetings, sends a heartbeat when it is due."""
        for _, envelope in self._receiver.receive_batch(wait_s):
            self.heard.append(envelope.message)
            self.worker = envelope.peer
            if isinstance(envelope.message, Hello) and self.welcomes:
                self.send(Welcome(PROTOCOL_VERSION, self.epoch))
        if self.worker and self.welcomes and time.monotonic() >= self._heartbeat_s:
            self._heartbeat_s = time.monotonic() + _HEARTBEAT_S
            self.port.send_now(self.worker, Heartbeat(self.epoch, State.READY, 0))

    def send(self, message: object) -> None:
        assert self.port.send(self.worker, message)

    def new_writer(self) -> PlanWriter:
        """Of plans in this scheduler's name, from step 0 on."""
        return PlanWriter(PAGE_SIZE, POOL_TOKENS // PAGE_SIZE, MAX_ROWS, self.epoch)

    def generate(self, writer: PlanWriter, requests: list[Request], num_outputs: int = 5) -> None:
        """Whole prompts, then a token each until all have so many."""
        while open_ones := [request for request in requests if len(request.output) < num_outputs]:
            parts = [(r, (r.num_expected or len(r.token_ids)) - r.num_planned) for r in open_ones]
            writer.take(self.run(writer.plan(*parts)))

    def release(self, writer: PlanWriter, requests: list[Request]) -> None:
        """The last plan of answers that have ended: their rows need not be kept."""
        for request in requests:
            writer.release(request)
        self.run(writer.plan())

    def wait_quiet(self) -> None:
        """Lets pass, in heartbeats, more time than a draining worker waits for a plan."""
        self.wait_for(Heartbeat, len(self.all_of(Heartbeat)) + 3)

    def tell_state(self, state: State) -> None:
        """The roster: the state of the worker that this scheduler acts on."""
        hello = self.all_of(Hello)[-1]
        member = Member(Role.GPU_WORKER, hello.instance, hello.epoch, hello.address, state)
        self.send(Roster(1, (member,)))

    def run(self, plan: StepPlan) -> StepResult:
        """Sends a plan and waits for its result."""
        count = len(self.all_of(StepResult)) + 1
        self.send(plan)
        return self.wait_for(StepResult, count)[-1]


class WorkerThread:
    """The real service, run by a thread of this process."""

    def __init__(self, settings: Settings) -> None:
        self.process = Process(settings, Identity(Role.GPU_WORKER, "0"))
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """What SIGTERM does."""
        self.process.is_stopping = True
        if self.process.on_stop is not None:
            self.process.on_stop()

    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait_ended(self, scheduler: TestScheduler | None = None) -> BaseException | None:
        """The error that the service ended with, or None."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._thread.is_alive():
            assert time.monotonic() < deadline, "the worker does not end"
            if scheduler is not None:
                scheduler.turn(0.02)
            else:
                self._thread.join(0.05)
        return self.error

    def _run(self) -> None:
        try:
            main(self.process)
        except BaseException as error:
            self.error = error


@contextmanager
def worker_thread(settings: Settings) -> Iterator[WorkerThread]:
    """A worker that has ended when the block ends."""
    worker = WorkerThread(settings)
    try:
        yield worker
    finally:
        worker.process.is_hurried = True  # nobody plans any more: it would wait for what it holds until it misses us
        worker.stop()
        worker.wait_ended()


@contextmanager
def serving(settings: Settings, net: Sockets) -> Iterator[tuple[TestScheduler, WorkerThread]]:
    """A worker that is ready to take plans, and the scheduler that it has joined."""
    with worker_thread(settings) as worker:
        scheduler = TestScheduler(net)
        scheduler.wait_ready()
        yield scheduler, worker


def start_process(**settings: object) -> subprocess.Popen[str]:
    """`python -m services.gpu_worker` with settings in its environment, as the launcher starts it."""
    environment = {f"TOKENWAY_{name.upper()}": str(value) for name, value in settings.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "services.gpu_worker"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"} | environment,
        stderr=subprocess.PIPE,
        text=True,
    )
