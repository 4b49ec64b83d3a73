"""Triton kernels against the plain way on a device, and replayed decode steps against launched ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.device import kernel_cases
from bench.device.kernel_cases import TOLERANCES, difference
from bench.device.report import Outcome, held
from bench.random_checkpoints import Shape, write_checkpoint
from services.gpu_worker.attention import attention_for
from services.gpu_worker.decode_graphs import GraphLimits
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.graph_device import CudaGraphDevice
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.weights import load_model
from services.model_files.source import open_model

_PAGE_SIZE, _MAX_LENGTH, _MAX_ROWS = 4, 100, 24
_MOST_DIFFERENCE = 1e-3  # float32, of logits some units wide; the order of sums depends on the number of splits


def check_kernels(device: torch.device) -> Iterator[Outcome]:
    """Every case that the interpreter is given, for real: the largest difference of each kind."""
    attention = [
        difference(*kernel_cases.attention_results(case, device)) / TOLERANCES[case.dtype]
        for case in kernel_cases.attention_cases()
    ]
    yield _worst("attention", attention)
    rotary = [
        difference(found, expected) / TOLERANCES[case.dtype]
        for case in kernel_cases.rotary_cases()
        for found, expected in kernel_cases.rotary_results(case, device)
    ]
    yield _worst("rotation and KV write", rotary)
    rest = [
        difference(found, expected) / most
        for dtype, most in TOLERANCES.items()
        for found, expected in [
            *kernel_cases.norm_results(3, 5120, dtype, device),
            kernel_cases.gated_results(3, 17408, dtype, device),
        ]
    ]
    yield _worst("norm and gate", rest)


def _worst(name: str, shares: list[float]) -> Outcome:
    figure = f"{len(shares)} results, the worst at {max(shares):.2f} of its tolerance"
    return held(f"kernels, {name}", max(shares) <= 1.0, figure)


def check_graphs(device: torch.device) -> Iterator[Outcome]:
    """Batches of every size up to one more than the largest recorded, replayed and launched, over equal pools."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(open_model(write_checkpoint(Path(folder) / "m", "qwen3", Shape())), device, torch.float32)
    config = model.config
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, _PAGE_SIZE, torch.float32)
    pages_of_row = _MAX_LENGTH // _PAGE_SIZE
    runners = [
        ModelRunner(
            config,
            model.weights,
            KvCache(shape, (_MAX_ROWS + 1) * pages_of_row, device),
            attention_for(device, torch.float32, config.head_dim),
            operators_for(device),
        )
        for _ in range(2)
    ]
    mark = torch.randn(runners[0].kv_cache.keys.shape, device=device)
    for runner in runners:
        runner.kv_cache.keys.copy_(mark)
        runner.kv_cache.values.copy_(mark)
    runners[1].record_decode(GraphLimits(_MAX_ROWS, _MAX_LENGTH), CudaGraphDevice(device), lambda size: None)
    worst = 0.0
    for count in [*range(1, _MAX_ROWS + 2), *range(_MAX_ROWS, 0, -1)]:
        rows = [
            StepRow([row], (37 * row + count) % _MAX_LENGTH, range(row * pages_of_row, (row + 1) * pages_of_row), True)
            for row in range(count)
        ]
        inputs = build_step_inputs(rows, _PAGE_SIZE, device)
        expected, found = (runner.forward(inputs) for runner in runners)
        worst = max(worst, difference(found, expected))
    yield held("graphs, replayed and launched", worst <= _MOST_DIFFERENCE, f"logits differ by {worst:.1e}")
    # Steps have written the same tokens to both pools: outside of the dummy page all is equal.
    pools = [torch.stack([runner.kv_cache.keys, runner.kv_cache.values])[:, :, :-1] for runner in runners]
    worst = difference(pools[1], pools[0])
    yield held("graphs, pool after padded steps", worst <= _MOST_DIFFERENCE, f"slots differ by {worst:.1e}")
