"""A worker process without a model: it speaks the wire as gpu_worker does, each step takes a set time.

    python -m bench.fake_worker --step-ms 25 --report FILE [settings as of any service]

Steps run one after the other like on a device: a plan that is there before the step ahead of it has ended begins when
that one ends, so the pace does not depend on how quickly this process wakes up. At its end it writes what became of the
pace: how many steps, how long from one to the next, how late their results left.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from bench.fake_model import FakeModel, plain_token_ids
from services.launcher.bench.summary import summarize
from services.model_files.digest import model_digest
from services.model_files.source import open_model
from services.model_files.vocabulary import load_vocabulary
from services.runtime.config import Settings
from services.runtime.service import Process, run_service
from services.wire.members import Role, State, WorkerCard
from services.wire.steps import StepPlan, StepResult
from services.wire.transport import BlockingReceiver, DealerPort

_DEFAULT_KV_TOKENS = 2**21
_DEFAULT_CONTEXT = 8192
_CHUNK_TOKENS = 512
_PAUSE_S = 0.5  # a longer gap between two steps is a pause of the load, not of the pace


@dataclass
class Pace:
    """When steps end, and what became of that."""

    step_s: float
    ended_s: float = 0.0
    periods_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    num_rows: int = 0

    def due_s(self, now_s: float) -> float:
        """When a step whose plan is taken up now will have ended."""
        start_s = max(now_s, self.ended_s)
        end_s = start_s + self.step_s
        if end_s - self.ended_s < self.step_s + _PAUSE_S:
            self.periods_s.append(end_s - self.ended_s)
        self.ended_s = end_s
        return end_s

    def report(self) -> dict[str, object]:
        """For the report file."""
        num_steps = len(self.late_s)
        return {
            "steps": num_steps,
            "rows_per_step": round(self.num_rows / max(num_steps, 1), 2),
            "step_ms": 1000 * self.step_s,
            "period": dataclasses.asdict(summarize(self.periods_s)),
            "late": dataclasses.asdict(summarize(self.late_s)),
        }


class FakeWorker:
    """The loop: takes plans, answers each when its time has come."""

    def __init__(self, process: Process, step_s: float) -> None:
        files = open_model(process.settings.model)
        vocabulary = load_vocabulary(files)
        self._process = process
        self._model = FakeModel(plain_token_ids(vocabulary))
        self._pace = Pace(step_s)
        self._session = process.new_session("")
        card = _card(process.settings, vocabulary.num_entries, step_s)
        self._session.worker_card = dataclasses.replace(card, model_digest=model_digest(files))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._port = DealerPort(self._context, process.scheduler_endpoint(), process.identity.routing_id)
        self._receiver = BlockingReceiver([self._port])
        self._running: deque[tuple[float, StepResult]] = deque()
        self._epoch: int | None = None
        process.on_stop = self._receiver.interrupt

    def serve(self) -> Pace:
        """Runs until told to stop."""
        self._session.set_state(State.READY, time.monotonic())
        while not self._process.is_stopping:
            now_s = time.monotonic()
            for message in self._session.messages_due(now_s):
                self._port.send_now(message)
            wait_s = self._session.next_due_s(now_s)
            if self._running:
                wait_s = min(wait_s, self._running[0][0] - now_s)
            for _, envelope in self._receiver.receive_batch(max(wait_s, 0.0)):
                if not self._session.receive(envelope.message, time.monotonic()):
                    self._take(envelope.message)
            self._send_ended(time.monotonic())
        self._port.send(self._session.goodbye())
        self._port.close(linger_ms=1000)
        self._context.term()
        return self._pace

    def _take(self, plan: object) -> None:
        if not isinstance(plan, StepPlan) or plan.epoch != self._session.scheduler_epoch:
            return
        if plan.epoch != self._epoch:
            self._epoch = plan.epoch
            self._model.release_all()
            self._running.clear()
        self._pace.num_rows += len(plan.samples)
        due_s = self._pace.due_s(time.monotonic())
        self._running.append((due_s, self._model.run(plan, int(1e6 * self._pace.step_s))))

    def _send_ended(self, now_s: float) -> None:
        while self._running and self._running[0][0] <= now_s:
            due_s, result = self._running.popleft()
            self._port.send(result)
            self._session.progress += 1
            self._pace.late_s.append(now_s - due_s)


def _card(settings: Settings, vocab_size: int, step_s: float) -> WorkerCard:
    return WorkerCard(
        vocab_size=vocab_size,
        logits_width=vocab_size,
        page_size=settings.page_size,
        num_pages=(settings.kv_cache_tokens or _DEFAULT_KV_TOKENS) // settings.page_size,
        max_model_len=settings.max_model_len or _DEFAULT_CONTEXT,
        max_rows=settings.max_running_requests,
        chunk_tokens=_CHUNK_TOKENS,
        chunk_ms=1000 * step_s,
    )


def _main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--report", type=Path)
    options, settings_arguments = parser.parse_known_args()
    sys.argv[1:] = settings_arguments  # the rest is read as the settings of any service

    def serve(process: Process) -> None:
        pace = FakeWorker(process, options.step_ms / 1000).serve()
        if options.report is not None:
            options.report.write_text(json.dumps(pace.report()), encoding="utf-8")

    run_service(Role.GPU_WORKER, serve)


if __name__ == "__main__":
    _main()
