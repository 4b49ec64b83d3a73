"""Triton kernels against the plain way on a device, and replayed decode steps against launched ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from bench.device import kernel_cases
from bench.device.kernel_cases import TOLERANCES, GroupedCase, difference, grouped_inputs
from bench.device.limits import median_s
from bench.device.report import Outcome, held, measured
from bench.random_checkpoints import Shape, write_checkpoint
from services.gpu_worker.attention import attention_for, ways_on_cuda
from services.gpu_worker.attention.fastest import AttentionTask, Size, measure
from services.gpu_worker.decode_graphs import GraphLimits
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.graph_device import CudaGraphDevice
from services.gpu_worker.kernels import rounding_for, with_fast_experts
from services.gpu_worker.kernels.grouped_choice import grouped_product_for, torch_or_ours, torch_product
from services.gpu_worker.kernels.grouped_product import grouped_product
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.models.config import ExpertConfig
from services.gpu_worker.models.projection import DenseProjection
from services.gpu_worker.products.fp8 import Fp8Projection
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.weights import load_model
from services.model_files.source import open_model

_PAGE_SIZE, _MAX_LENGTH, _MAX_ROWS = 4, 100, 24
_MOST_OFF = 0.005  # numbers of which the kernel rounds another way: ties, after a division that is not exact
_MOST_FP8_ERROR = 0.06  # of a product of random numbers: each is off by 2.6 % of itself on average, weights and inputs
_MOST_DIFFERENCE = 1e-3  # float32, of logits some units wide; the order of sums depends on the number of splits


def check_kernels(device: torch.device) -> Iterator[Outcome]:
    """Every case that the interpreter is given, for real: the largest difference of each kind."""
    has_fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    attention = [
        difference(*kernel_cases.attention_results(case, device)) / TOLERANCES[case.dtype]
        for case in kernel_cases.attention_cases()
        if case.kv_dtype is None or has_fp8
    ]
    yield _worst("attention", attention)
    rotary = [
        difference(found, expected) / TOLERANCES[case.dtype]
        for case in kernel_cases.rotary_cases()
        if case.kv_dtype is None or has_fp8
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
    grouped = [
        difference(*kernel_cases.grouped_results(case, device)) / TOLERANCES[case.dtype]
        for case in kernel_cases.grouped_cases()
    ]
    yield _worst("products with experts", grouped)
    experts = ExpertConfig(num_experts=128, num_chosen=8, intermediate_size=768, normalizes_shares=True, in_layers=())
    steps = [
        difference(found, expected) / (TOLERANCES[torch.bfloat16] if found.is_floating_point() else 1.0)
        for num_tokens in (1, 16, 2048)
        for found, expected in kernel_cases.expert_step_results(num_tokens, experts, torch.bfloat16, device)
    ]
    yield _worst("steps of experts", steps)
    if has_fp8:
        found, expected = kernel_cases.rounding_results(64, 5120, torch.bfloat16, device)
        off = float((found != expected).float().mean())
        yield held("kernels, rows in 8 bits", off < _MOST_OFF, f"{off:.2%} of the numbers are others")
        yield from _fp8_product(device)
    yield from _experts_speed(device)


def check_ways_of_attention(device: torch.device) -> Iterator[Outcome]:
    """Each that goes for heads as Qwen3-14B's, for small pages and large: microseconds of a decode and of a chunk."""
    for page_size in (16, 256):
        shape = KvCacheShape(1, 8, 128, page_size, torch.bfloat16)
        task = AttentionTask(device, torch.bfloat16, shape, 40)
        ways = ways_on_cuda(task)
        times = measure(ways, task, Size())
        figure = ", ".join(
            f"{name} {1e6 * each.decode_s:.0f} and {1e6 * each.chunk_s:.0f} us" for name, each in times.items()
        )
        yield held(f"ways of attention, pages of {page_size}", times.keys() == ways.keys(), figure or "none is right")


def _fp8_product(device: torch.device) -> Iterator[Outcome]:
    """A matrix as Qwen3-14B's in 8 bits against itself: how far off, and beside bfloat16 how fast."""
    weight = torch.randn(17408, 5120, device=device, dtype=torch.bfloat16) * 0.02
    dense, eight = DenseProjection(weight), Fp8Projection(weight, None, rounding_for(device))
    for rows in (1, 64, 2048):
        x = torch.randn(rows, 5120, device=device, dtype=torch.bfloat16)
        expected = dense(x).float()
        error = float((eight(x).float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        times = [1e6 * median_s(device, partial(projection, x)) for projection in (eight, dense)]
        figure = f"off by {error:.1%}, {times[0]:.0f} us, bfloat16 {times[1]:.0f} us"
        yield held(f"product in 8 bits, {rows} rows", error < _MOST_FP8_ERROR, figure)


def _experts_speed(device: torch.device) -> Iterator[Outcome]:
    """Layers as Qwen3-30B-A3B's: few rows of an expert and many, each way that there is, beside what must be read."""
    product = grouped_product_for(device, torch.bfloat16)
    ways = {"ours": grouped_product} | ({"torch": torch_product} if product is torch_or_ours else {})
    if product is torch_or_ours:
        arguments = grouped_inputs(GroupedCase((300, 0, 1, 129), 256, 320, torch.bfloat16), device)
        share = difference(torch_product(*arguments), grouped_product(*arguments)) / TOLERANCES[torch.bfloat16]
        yield _worst("torch's product with experts", [share])
    for rows_of_expert in (1, 16, 64, 256):
        case = GroupedCase((rows_of_expert,) * 128, 2048, 1536, torch.bfloat16)
        arguments = grouped_inputs(case, device)
        times = {name: median_s(device, partial(way, *arguments)) for name, way in ways.items()}
        figure = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in times.items())
        giga_bytes = arguments[1].nbytes / 1e9
        yield measured(f"experts, {rows_of_expert} rows each", f"{figure} ({giga_bytes:.2f} GB of weights)")


def _worst(name: str, shares: list[float]) -> Outcome:
    figure = f"{len(shares)} results, the worst at {max(shares):.2f} of its tolerance"
    return held(f"kernels, {name}", max(shares) <= 1.0, figure)


def check_graphs(device: torch.device) -> Iterator[Outcome]:
    """A dense model and one with experts."""
    for family in ("qwen3", "qwen3_moe"):
        yield from _check_graphs_of(family, device)


def _check_graphs_of(family: str, device: torch.device) -> Iterator[Outcome]:
    """Batches of every size up to one more than the largest recorded, replayed and launched, over equal pools."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(open_model(write_checkpoint(Path(folder) / "m", family, Shape())), device, torch.float32)
    config, weights = model.config, with_fast_experts(model.weights, device)
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, _PAGE_SIZE, torch.float32)
    pages_of_row = _MAX_LENGTH // _PAGE_SIZE
    runners = [
        ModelRunner(
            config,
            weights,
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
    yield held(f"graphs of {family}, replayed and launched", worst <= _MOST_DIFFERENCE, f"logits differ by {worst:.1e}")
    # Steps have written the same tokens to both pools: outside of the dummy page all is equal.
    pools = [torch.stack([runner.kv_cache.keys, runner.kv_cache.values])[:, :, :-1] for runner in runners]
    worst = difference(pools[1], pools[0])
    yield held(
        f"graphs of {family}, pool after padded steps", worst <= _MOST_DIFFERENCE, f"slots differ by {worst:.1e}"
    )
