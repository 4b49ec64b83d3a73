"""Step times of a model of SmolLM2-135M's shape with random weights, through the worker's own runner and sampler."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from bench.device.report import Outcome, measured
from bench.random_checkpoints import Shape, write_checkpoint
from services.gpu_worker.attention import attention_for
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.sampler import sample
from services.gpu_worker.sampling_table import SamplingTable
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.weights import load_model
from services.model_files.source import open_model
from services.wire.request_params import SamplingParams

SMOLLM2 = Shape(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    max_positions=8192,
)  # fmt: skip
_PAGE_SIZE, _CONTEXT, _MAX_ROWS = 16, 512, 64
_REPEATS = 20


def check_speed(device: torch.device, shape: Shape = SMOLLM2) -> Iterator[Outcome]:
    """Loading, a prefill, decodes of several sizes, the sampler."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "model", "llama", shape)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = load_model(open_model(path), device, dtype)
    report = model.report
    yield measured("loading", f"disk {report.disk_gb_per_s:.2f} GB/s, to the device {report.device_gb_per_s:.2f} GB/s")
    pages_of_row = -(-(_CONTEXT + 1) // _PAGE_SIZE)
    config = model.config
    kv_shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, _PAGE_SIZE, dtype)
    kv_cache = KvCache(kv_shape, pages_of_row * _MAX_ROWS, device)
    runner = ModelRunner(config, model.weights, kv_cache, attention_for(device, dtype), operators_for(device))

    def step_ms(num_rows: int, num_computed: int, num_new: int) -> float:
        rows = [
            StepRow([1] * num_new, num_computed, range(row * pages_of_row, (row + 1) * pages_of_row), True)
            for row in range(num_rows)
        ]
        return _median_ms(device, lambda: runner.forward(build_step_inputs(rows, _PAGE_SIZE, device)))

    milliseconds = step_ms(1, 0, _CONTEXT)
    yield measured(f"prefill of {_CONTEXT}", f"{milliseconds:.2f} ms, {_CONTEXT / milliseconds * 1000:,.0f} tokens/s")
    for num_rows in (1, 16, _MAX_ROWS):
        milliseconds = step_ms(num_rows, _CONTEXT, 1)
        rate = num_rows / milliseconds * 1000
        yield measured(f"decode, {num_rows} rows of {_CONTEXT}", f"{milliseconds:.2f} ms, {rate:,.0f} tokens/s")
    yield from _sampler_speed(device, shape.vocab_size)


def _sampler_speed(device: torch.device, vocab_size: int) -> Iterator[Outcome]:
    logits = torch.randn(16, vocab_size, device=device) * 3
    numbers = np.arange(16, dtype=np.int64)
    for name, top_p, temperature in (("greedy", 1.0, 0.0), ("temperature", 1.0, 1.0), ("top_p 0.9", 0.9, 1.0)):
        table = SamplingTable(16, device)
        table.set_rows(range(16), [SamplingParams(temperature, top_p, 0, 0.0, seed, 0) for seed in range(16)])
        milliseconds = _median_ms(device, functools.partial(sample, logits, table.groups(numbers, numbers)))
        yield measured(f"sampler, 16 rows, {name}", f"{milliseconds:.2f} ms")


def _median_ms(device: torch.device, run: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        _wait(device)
        begin = perf_counter()
        run()
        _wait(device)
        times.append(perf_counter() - begin)
    return 1000 * median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
