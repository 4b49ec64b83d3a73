"""A launcher with a tiny pool, and the scheduler that writes its plans."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import pytest
import torch

from services.gpu_worker.attention import attention_for
from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.grammar_seam import Grammars
from services.gpu_worker.held_rows import WorkerSizes
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.step_launcher import PendingStep, StepLauncher
from services.gpu_worker.weights import LoadedModel
from services.gpu_worker.worker_state import WorkerState
from tests.unit.gpu_worker.plan_writer import PlanWriter, Request

CPU = torch.device("cpu")
MAX_ROWS, NUM_PAGES, NUM_OUTPUTS = 6, 160, 8


@dataclass
class Bench:
    """A launcher and the scheduler that writes its plans."""

    launcher: StepLauncher
    writer: PlanWriter
    kv_cache: KvCache
    runner: ModelRunner

    def run(self, *parts: tuple[Request, int]) -> None:
        """One step, its result taken at once."""
        self.take(self.launcher.launch(self.writer.plan(*parts)))

    def verify(self, request: Request, proposal: list[int], *others: tuple[Request, int]) -> int:
        """A step in which a decode has a proposal; returns how many ids it got."""
        num_before = len(request.output)
        plan = self.writer.plan((request, 1), *others, proposals={request.number: proposal})
        self.take(self.launcher.launch(plan))
        return len(request.output) - num_before

    def take(self, pending: PendingStep) -> None:
        pending.wait_copied()
        self.writer.take(self.launcher.finish(pending))

    def finish_all(self, requests: list[Request], num_outputs: int = NUM_OUTPUTS) -> None:
        """Whole prompts, then one token each until all have enough."""
        while open_ones := [r for r in requests if len(r.output) < num_outputs and not r.finish]:
            self.run(*((r, (r.num_expected or len(r.token_ids)) - r.num_planned) for r in open_ones))

    def refuse_rows_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The logits of several rows at once find no memory from now on: rows are run one by one."""
        compute = self.runner.logits

        def broken(normed: torch.Tensor) -> torch.Tensor:
            if len(normed) > 1:
                raise MemoryError
            return compute(normed)

        monkeypatch.setattr(self.runner, "logits", broken)

    def run_any_course(self, requests: list[Request], seed: int, plans_ahead: int) -> None:
        """Random chunks and decodes; plans go out before results are read; some are retracted and resume."""
        chance = random.Random(seed)
        in_flight: deque[tuple[PendingStep, list[Request]]] = deque()
        while any(len(request.output) < NUM_OUTPUTS for request in requests):
            parts = []
            for request in requests:
                is_enough = request.num_expected >= len(request.prompt) + NUM_OUTPUTS
                if is_enough or chance.random() < 0.3:
                    continue
                if request.row >= 0 and chance.random() < 0.1 and all(request not in ran for _, ran in in_flight):
                    self.writer.release(request)
                    request.num_expected = 0
                left = (request.num_expected if request.row >= 0 else len(request.token_ids)) - request.num_planned
                parts.append((request, chance.randint(1, left)))
            chance.shuffle(parts)
            if parts:
                in_flight.append((self.launcher.launch(self.writer.plan(*parts)), [request for request, _ in parts]))
            while len(in_flight) > (plans_ahead if parts else 0):
                self.take(in_flight.popleft()[0])


def new_bench(
    model: LoadedModel,
    page_size: int = 4,
    grammars: Grammars | None = None,
    max_model_len: int = 128,
    attention: AttentionBackend | None = None,
) -> Bench:
    """With the pool empty and no row held."""
    config = model.config
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, page_size, torch.float32)
    kv_cache = KvCache(shape, NUM_PAGES, CPU)
    runner = ModelRunner(config, model.weights, kv_cache, attention or attention_for(CPU, torch.float32))
    state = WorkerState(WorkerSizes(MAX_ROWS, max_model_len, config.vocab_size, page_size, NUM_PAGES), CPU, grammars)
    return Bench(StepLauncher(runner, state), PlanWriter(page_size, NUM_PAGES, MAX_ROWS), kv_cache, runner)
