"""Decode, prefill and sampling of a large model with random weights, beside what the device can do at most.

Steps go through the worker's own launcher, one plan ahead of their results. How long the device works on them is
measured with the same plans put into its queue while it is kept waiting: there are no gaps then, and what the real run
takes longer is idleness.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from bench.device.limits import ModelCost, cost_of, measure_limits, median_s, wait_for
from bench.device.report import Outcome, measured
from bench.random_checkpoints import Shape, write_config
from services.gpu_worker.attention import attention_for
from services.gpu_worker.decode_graphs import GraphLimits
from services.gpu_worker.dummy_weights import dummy_model
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.graph_device import CudaGraphDevice
from services.gpu_worker.held_rows import WorkerSizes
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.machine_limits import MachineLimits
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.step_launcher import PendingStep, StepLauncher
from services.gpu_worker.worker_state import WorkerState
from services.model_files.source import open_model
from services.wire.columns import pack_int32
from services.wire.request_params import SamplingParams
from services.wire.steps import NewRow, StepPlan

QWEN3_14B = Shape(
    vocab_size=151936, hidden_size=5120, intermediate_size=17408, num_layers=40, num_heads=40, num_kv_heads=8,
    head_dim=128, max_positions=40960,
)  # fmt: skip
_PAGE_SIZE = 16
_QUEUE_S = 0.4  # the device is kept waiting so long while a run's plans are put into its queue
_CYCLES_PER_S = 2e9  # at least what the clock of any device makes


@dataclass(frozen=True)
class Sizes:
    """What is run: batches of decodes of `context` tokens each, `num_steps` of them, and a prompt."""

    batches: tuple[int, ...] = (1, 32, 256)
    context: int = 1024
    num_steps: int = 24
    prompt: int = 8192
    copied_bytes: int = 2**31
    product_side: int = 8192


TINY = Sizes(batches=(1, 3), context=40, num_steps=4, prompt=64, copied_bytes=2**20, product_side=64)
"""To try the checks themselves on a CPU."""


def check_roofline(device: torch.device, shape: Shape = QWEN3_14B, sizes: Sizes | None = None) -> Iterator[Outcome]:
    """One line for each number of the table."""
    sizes = sizes or Sizes()
    limits = measure_limits(device, sizes.copied_bytes, sizes.product_side)
    yield measured("limit, memory", f"{limits.bytes_per_s / 1e9:,.0f} GB/s")
    yield measured("limit, bfloat16 products", f"{limits.operations_per_s / 1e12:,.1f} TFLOP/s")
    bench = _Bench(device, shape, sizes)
    yield measured("random weights", f"{bench.load_s:.1f} s")
    yield bench.record()
    for num_rows in sizes.batches:
        yield from bench.decode(num_rows, limits)
    yield bench.prefill(limits)


class _Bench:
    """A model of random weights with a pool for the largest batch."""

    def __init__(self, device: torch.device, shape: Shape, sizes: Sizes) -> None:
        self._device, self._sizes = device, sizes
        dtype = torch.bfloat16
        begin = perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            model = dummy_model(open_model(write_config(Path(folder) / "model", "qwen3", shape)), device, dtype)
        wait_for(device)
        self.load_s = perf_counter() - begin
        config = model.config
        self._cost: ModelCost = cost_of(config, dtype)
        self._max_length = max(sizes.prompt, sizes.context + 2 * sizes.num_steps + 2)
        self._pages_of_row = -(-(sizes.context + 2 * sizes.num_steps + 2) // _PAGE_SIZE)
        most_pages = max(max(sizes.batches) * self._pages_of_row, -(-sizes.prompt // _PAGE_SIZE))
        kv_shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, _PAGE_SIZE, dtype)
        attention = attention_for(device, dtype, config.head_dim)
        kv_cache = KvCache(kv_shape, most_pages, device)
        self._runner = ModelRunner(config, model.weights, kv_cache, attention, operators_for(device))
        self._vocab_size = config.vocab_size

    def record(self) -> Outcome:
        """Graphs for all batches up to the largest."""
        if self._device.type != "cuda" or not self._runner.can_record_decode:
            return measured("graph capture", "none: nothing is recorded here")
        begin = perf_counter()
        limits = GraphLimits(max(self._sizes.batches), self._max_length)
        graphs = self._runner.record_decode(limits, CudaGraphDevice(self._device), lambda size: None)
        wait_for(self._device)
        return measured("graph capture", f"{len(graphs.sizes)} sizes in {perf_counter() - begin:.1f} s (<= 10)")

    def decode(self, num_rows: int, limits: MachineLimits) -> Iterator[Outcome]:
        """Time of a step, share of the memory's limit, idleness, sampling."""
        name = f"decode of {num_rows}"
        wall_s, _ = self._run(num_rows, is_held_back=False)
        milliseconds = 1000 * wall_s / self._sizes.num_steps
        contexts = [self._sizes.context + self._sizes.num_steps // 2] * num_rows
        share = self._cost.decode_bytes(contexts) / (wall_s / self._sizes.num_steps) / limits.bytes_per_s
        rate = num_rows / milliseconds * 1000
        yield measured(
            name, f"{milliseconds:.2f} ms, {rate:,.0f} tokens/s, {share:.1%} of the memory's limit (1: >= 85%)"
        )
        if self._device.type == "cuda":
            busy_s, sampling = self._run(num_rows, is_held_back=True)
            yield measured(f"{name}, idle", f"{max(0.0, 1 - busy_s / wall_s):.1%} between steps (<= 3%)")
            yield measured(f"{name}, sampling", f"{sampling:.1%} of a step (<= 3%)")

    def prefill(self, limits: MachineLimits) -> Outcome:
        """A whole prompt in one step."""
        num_tokens = self._sizes.prompt
        rows = [StepRow([1] * num_tokens, 0, range(-(-num_tokens // _PAGE_SIZE)), samples=True)]
        inputs = build_step_inputs(rows, _PAGE_SIZE, self._device)
        seconds = median_s(self._device, lambda: self._runner.forward(inputs))
        share = self._cost.prefill_operations(num_tokens) / seconds / limits.operations_per_s
        rate = num_tokens / seconds
        return measured(
            f"prefill of {num_tokens}",
            f"{1000 * seconds:.1f} ms, {rate:,.0f} tokens/s, {share:.1%} of the products' limit (>= 60%)",
        )

    def _run(self, num_rows: int, is_held_back: bool) -> tuple[float, float]:
        """Seconds of the steps, and the share of them that is not the forward pass."""
        sizes = WorkerSizes(num_rows, self._max_length, self._vocab_size, _PAGE_SIZE, self._runner.kv_cache.num_pages)
        launcher = StepLauncher(self._runner, WorkerState(sizes, self._device))
        plans = deque(self._plans(num_rows))
        first = launcher.launch(plans.popleft())
        first.wait_copied()
        launcher.finish(first)
        wait_for(self._device)
        pending: deque[PendingStep] = deque()
        results = []
        if is_held_back:
            torch.cuda._sleep(int(_QUEUE_S * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
        clock = _DeviceClock(self._device)
        while plans:
            pending.append(launcher.launch(plans.popleft()))
            if len(pending) == 2 and not is_held_back:
                pending[0].wait_copied()
                results.append(launcher.finish(pending.popleft()))
        seconds = clock.stop()
        for step in pending:
            step.wait_copied()
            results.append(launcher.finish(step))
        step_us = sum(result.step_us for result in results)
        forward_us = sum(result.forward_us for result in results)
        return seconds, 1 - forward_us / step_us if step_us else 0.0

    def _plans(self, num_rows: int) -> Iterator[StepPlan]:
        """Rows whose contexts are in the pool but for the last token, then a token each."""
        context = self._sizes.context
        rows = range(num_rows)
        for step in range(self._sizes.num_steps + 1):
            new_rows = tuple(self._new_row(row) for row in rows) if step == 0 else ()
            starts, counts = pack_int32([context - 1 + step] * num_rows), pack_int32([1] * num_rows)
            samples = bytes([1]) * num_rows
            yield StepPlan(1, step, b"", new_rows, b"", b"", b"", pack_int32(rows), starts, counts, samples)

    def _new_row(self, row: int) -> NewRow:
        context = self._sizes.context
        sampling = SamplingParams(0.7, 0.9, 0, 0.0, row, 0)
        pages = pack_int32(range(row * self._pages_of_row, (row + 1) * self._pages_of_row))
        ids = pack_int32([1 + row % 100] * context)
        return NewRow(row, row.to_bytes(16, "big"), 0, ids, context, pages, sampling)


class _DeviceClock:
    """Time between two points of a device's queue."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = self._mark()
        self._begin = perf_counter()

    def stop(self) -> float:
        """Seconds since it was made, once the device has come this far."""
        end = self._mark()
        wait_for(self._device)
        if self._event is None or end is None:
            return perf_counter() - self._begin
        return float(self._event.elapsed_time(end)) / 1000

    def _mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
