"""The whole worker service on a device, planned for by the scheduler's real core, against the same on the CPU."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import zmq

from bench.device.report import Outcome, held
from bench.random_checkpoints import write_checkpoint
from services.gpu_worker.service import main
from services.runtime.config import Settings
from services.runtime.service import Process
from services.scheduler.core import Core
from services.scheduler.request import Request
from services.scheduler.workers import limits_of
from services.wire.columns import pack_int32, unpack_int32
from services.wire.endpoints import Identity
from services.wire.finish import Finish
from services.wire.members import Heartbeat, Hello, Role, State, Welcome
from services.wire.messages import PROTOCOL_VERSION
from services.wire.request_params import SamplingParams, TextParams
from services.wire.requests import Submit
from services.wire.steps import StepResult
from services.wire.transport import BlockingReceiver, RouterPort

_TIMEOUT_S = 90.0
_NUM_REQUESTS, _NUM_TOKENS = 12, 40
_EPOCH = 1


class ServiceError(Exception):
    """The service did not do its work in time, or ended."""


def check_service(device: str) -> Iterator[Outcome]:
    """Greedy and seeded requests, steps planned ahead and not, a pool that is large enough and one that is not."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            model=str(write_checkpoint(Path(folder) / "tiny", "qwen3")),
            dtype="float32",
            numerics="exact",
            kv_cache_tokens=1600,
            max_running_requests=16,
            chunked_prefill_size=64,
            num_threads=1,
            instance="0",
        )
        expected, _ = answers(replace(settings, device="cpu", plans_ahead=0))
        for plans_ahead, pool_tokens in ((0, 1600), (1, 1600), (4, 1600), (1, 256)):
            own = replace(settings, device=device, plans_ahead=plans_ahead, kv_cache_tokens=pool_tokens)
            found, seconds = answers(own)
            num_equal = sum(a == b for a, b in zip(found, expected, strict=True))
            figure = f"{num_equal} of {len(expected)} answers equal, {seconds:.1f} s"
            yield held(f"service, {plans_ahead} steps ahead, pool {pool_tokens}", num_equal == len(expected), figure)


def answers(settings: Settings, submits: Sequence[Submit] | None = None) -> tuple[list[list[int]], float]:
    """The output ids of some requests from a worker with these settings, and how long they took once it was ready.

    Args:
        settings: of the worker.
        submits: the requests; each must generate all its tokens. None: a few small ones.
    """
    with tempfile.TemporaryDirectory(prefix="tw") as run_dir:
        process = Process(replace(settings, run_dir=run_dir), Identity(Role.GPU_WORKER, "0"))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        port = RouterPort(context, process.scheduler_endpoint())
        worker = threading.Thread(target=main, args=(process,), daemon=True)
        worker.start()
        try:
            return _Scheduler(port, settings, worker, submits or _submits()).run()
        finally:
            process.is_stopping = True
            if process.on_stop is not None:
                process.on_stop()
            worker.join(_TIMEOUT_S)
            port.close()
            context.term()


class _Scheduler:
    """As much of the scheduler's shell as one worker needs."""

    def __init__(
        self, port: RouterPort, settings: Settings, worker: threading.Thread, submits: Sequence[Submit]
    ) -> None:
        self._port = port
        self._settings = settings
        self._worker = worker
        self._submits = submits
        self._receiver = BlockingReceiver([port])
        self._core: Core | None = None
        self._begin_s = 0.0

    def run(self) -> tuple[list[list[int]], float]:
        deadline_s = time.monotonic() + _TIMEOUT_S
        requests: list[Request] = []
        heartbeat_s = 0.0
        while self._core is None or not self._core.is_idle:
            if time.monotonic() > deadline_s or not self._worker.is_alive():
                raise ServiceError("the worker ended" if time.monotonic() < deadline_s else "the worker takes too long")
            for _, envelope in self._receiver.receive_batch(0.05):
                peer, message = envelope.peer, envelope.message
                if isinstance(message, Hello):
                    self._port.send(peer, Welcome(PROTOCOL_VERSION, _EPOCH))
                    if message.worker is not None and self._core is None:
                        self._core = Core(limits_of(message.worker, self._settings), _EPOCH)
                        requests = [self._core.submit(submit) for submit in self._submits]
                        self._begin_s = time.monotonic()
                elif isinstance(message, StepResult) and self._core is not None:
                    self._core.apply_result(message)
                while self._core is not None and self._core.can_plan() and (plan := self._core.plan_step()):
                    self._port.send(peer, plan)
                if time.monotonic() >= heartbeat_s:
                    heartbeat_s = time.monotonic() + 0.2
                    self._port.send_now(peer, Heartbeat(_EPOCH, State.READY, 0))
        if any(request.finish != Finish.LENGTH for request in requests):
            raise ServiceError(f"answers ended as {sorted({request.finish.name for request in requests})}")
        return [_output_of(request) for request in requests], time.monotonic() - self._begin_s


def _output_of(request: Request) -> list[int]:
    return unpack_int32(bytes(request.token_bytes))[request.num_prompt :]


def _submits() -> list[Submit]:
    chance = random.Random(8)
    submits = []
    for number in range(_NUM_REQUESTS):
        prompt = [chance.randrange(150) for _ in range(chance.randint(1, 90))]
        temperature = 0.0 if number % 2 else 0.8
        sampling = SamplingParams(temperature, 0.9 if number % 4 else 1.0, 0, 0.0, number, 0)
        submits.append(submit_of(number + 1, prompt, sampling, _NUM_TOKENS))
    return submits


def submit_of(number: int, prompt: Sequence[int], sampling: SamplingParams, max_tokens: int) -> Submit:
    """A request that ends when it has all its tokens."""
    return Submit(
        request_id=number.to_bytes(16, "big"),
        attempt=0,
        prompt_token_ids=pack_int32(prompt),
        output_token_ids=b"",
        sampling=sampling,
        text=TextParams((), False, True, 0),
        max_tokens=max_tokens,
        stop_token_ids=b"",
        group_id=number.to_bytes(16, "big"),
        tenant="",
        cache_root=b"",
        priority=0,
        deadline_ms=0,
    )
