"""gpu_worker: how fast its steps are, without a scheduler and without HTTP: prompts in chunks, then decodes.

The worker is started as for serving; plans are written here, one ahead of their results, as the scheduler writes them.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from services.gpu_worker.bench.report import BenchError, StepCount, beside_limits, tell, tell_machine
from services.gpu_worker.models.parse_config import parse_model_config
from services.gpu_worker.start_up import ReadyWorker, start_up
from services.gpu_worker.step_launcher import PendingStep
from services.model_files.source import open_model
from services.runtime.config import Settings
from services.wire.columns import pack_int32
from services.wire.request_params import SamplingParams
from services.wire.steps import NewRow, StepPlan

_EPOCH = 1
_PLANS_AHEAD = 1
_WARM_UP_STEPS = 3
_SEED = 0


@dataclass(slots=True)
class Phase:
    """Steps of one kind."""

    num_tokens: int = 0
    num_bytes: int = 0
    num_operations: int = 0
    forward_s: float = 0.0
    step_s: float = 0.0
    wall_s: float = 0.0


def bench_engine(settings: Settings, arguments: Sequence[str]) -> None:
    """Measures and tells; raises what a start raises, and BenchError."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sampling", choices=("greedy", "drawn"), required=True)
    options = parser.parse_args(arguments)
    _check_rows(settings, max(options.rows), options.context, options.steps)
    worker = start_up(settings, lambda: None)
    try:
        tell_machine(worker.roofline.machine)
        engine = Engine(worker, options.sampling == "drawn")
        for num_rows in options.rows:
            engine.check_pool(num_rows, options.context, options.steps)
        for num_rows in options.rows:
            prefill, decode = engine.run(num_rows, options.context, options.steps)
            for name, phase in (("prefill", prefill), ("decode", decode)):
                tell(row=_row(name, num_rows, options.context, phase, worker))
    finally:
        worker.grammars.close()


def _check_rows(settings: Settings, num_rows: int, context: int, num_steps: int) -> None:
    """BenchError where no worker with these settings can hold so much: known before weights are read."""
    if num_rows > settings.max_running_requests:
        raise BenchError(f"--rows: {num_rows} are more than --max-running-requests {settings.max_running_requests}")
    most = settings.max_model_len or parse_model_config(open_model(settings.model)).max_position_embeddings
    if (length := context + num_steps + _WARM_UP_STEPS) > most:
        raise BenchError(
            f"--context {context}, {_WARM_UP_STEPS} tokens of warm-up and --steps {num_steps} are {length} tokens: "
            f"more than the context of {most}"
        )


def _row(name: str, num_rows: int, context: int, phase: Phase, worker: ReadyWorker) -> dict[str, object]:
    limits = worker.roofline.machine.limits
    return {
        "stage": name,
        "rows": num_rows,
        "context": context,
        "tokens_per_s": phase.num_tokens / phase.wall_s,
        "step_over_forward": phase.step_s / phase.forward_s,
        **beside_limits(phase.forward_s, phase.num_bytes, phase.num_operations, limits),
    }


class Engine:
    """A worker that is told what to run."""

    def __init__(self, worker: ReadyWorker, draws: bool) -> None:
        self._worker = worker
        self._draws = draws
        self._num_steps = 0
        self._released = b""

    def check_pool(self, num_rows: int, context: int, num_steps: int) -> None:
        """BenchError where the pool of this worker does not hold so much."""
        card, length = self._worker.card, context + num_steps + _WARM_UP_STEPS
        if num_rows * -(-length // card.page_size) > card.num_pages:
            tokens = card.num_pages * card.page_size
            raise BenchError(f"{num_rows} rows of {length} tokens do not fit a pool of {tokens} (--kv-cache-tokens)")

    def run(self, num_rows: int, context: int, num_steps: int) -> tuple[Phase, Phase]:
        """Prompts of `context` tokens one after another, then `num_steps` tokens for each row: prefill and decode."""
        pages_of_row = -(-(context + num_steps + _WARM_UP_STEPS) // self._worker.card.page_size)
        num_chunks = num_rows * -(-context // self._worker.card.chunk_tokens)
        of_rows = f"{num_rows} x {context} tokens"
        prefill = self._measure(
            self._prompts(num_rows, context, pages_of_row), StepCount(f"prefill of {of_rows}", num_chunks)
        )
        self._measure(
            self._decodes(num_rows, context, _WARM_UP_STEPS), StepCount(f"warm-up of {of_rows}", _WARM_UP_STEPS)
        )
        decode = self._measure(
            self._decodes(num_rows, context + _WARM_UP_STEPS, num_steps), StepCount(f"decode of {of_rows}", num_steps)
        )
        self._released = pack_int32(range(num_rows))
        return prefill, decode

    def _prompts(self, num_rows: int, context: int, pages_of_row: int) -> Iterator[StepPlan]:
        chunk = self._worker.card.chunk_tokens
        vocab_size = self._worker.card.vocab_size
        generator = torch.Generator().manual_seed(_SEED)
        for row in range(num_rows):
            ids = torch.randint(0, vocab_size, (context,), generator=generator).tolist()
            pages = pack_int32(range(row * pages_of_row, (row + 1) * pages_of_row))
            new = NewRow(row, row.to_bytes(16, "big"), 0, pack_int32(ids), context, pages, self._sampling(row))
            for start in range(0, context, chunk):
                end = min(context, start + chunk)
                yield self._plan([row], start, end - start, (new,) if start == 0 else (), end == context)

    def _sampling(self, row: int) -> SamplingParams:
        return SamplingParams(*((0.7, 0.9) if self._draws else (0.0, 1.0)), 0, 0.0, row, 0)

    def _decodes(self, num_rows: int, first: int, num_steps: int) -> Iterator[StepPlan]:
        rows = list(range(num_rows))
        for position in range(first, first + num_steps):
            yield self._plan(rows, position, 1, (), True)

    def _plan(self, rows: list[int], start: int, count: int, new_rows: tuple[NewRow, ...], samples: bool) -> StepPlan:
        plan = StepPlan(
            epoch=_EPOCH, step=self._num_steps, released_rows=self._released, new_rows=new_rows, page_rows=b"",
            page_counts=b"", page_ids=b"", rows=pack_int32(rows), start_positions=pack_int32([start] * len(rows)),
            num_new_tokens=pack_int32([count] * len(rows)), samples=bytes([samples]) * len(rows),
        )  # fmt: skip
        self._num_steps += 1
        self._released = b""
        return plan

    def _measure(self, plans: Iterable[StepPlan], count: StepCount) -> Phase:
        phase, pending = Phase(), deque[PendingStep]()
        began = perf_counter()
        for plan in plans:
            pending.append(self._worker.launcher.launch(plan))
            if len(pending) > _PLANS_AHEAD:
                self._finish(pending.popleft(), phase)
                count.add()
        while pending:
            self._finish(pending.popleft(), phase)
        phase.wall_s = perf_counter() - began
        return phase

    def _finish(self, pending: PendingStep, phase: Phase) -> None:
        pending.wait_copied()
        result = self._worker.launcher.finish(pending)
        cost = self._worker.roofline.count(pending.plan, result)
        phase.num_tokens += cost.num_tokens
        phase.num_bytes += cost.num_bytes
        phase.num_operations += cost.num_operations
        phase.forward_s += result.forward_us / 1e6
        phase.step_s += result.step_us / 1e6
