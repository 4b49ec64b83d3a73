"""Many requests at once through worker and scheduler, with a small model of random weights: tokens per second.

The requests are those of a common public workload: 256 of them, prompts and answers of 100 to 1,024 tokens each. Worker
and scheduler share one process here; a server gives each its own.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.device.limits import ModelCost, cost_of, measure_limits
from bench.device.report import Outcome, held, measured
from bench.device.serving import answers, submit_of
from bench.random_checkpoints import Shape, write_config
from services.gpu_worker.machine_limits import MachineLimits
from services.gpu_worker.models.parse_config import parse_model_config
from services.model_files.source import open_model
from services.runtime.config import Settings
from services.wire.request_params import SamplingParams
from services.wire.requests import Submit

QWEN3_0_6B = Shape(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8,
    head_dim=128, max_positions=40960,
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """How many requests, and between how many tokens their prompts and answers have."""

    num_requests: int = 256
    low: int = 100
    high: int = 1024
    copied_bytes: int = 2**31
    product_side: int = 8192

    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, answer) of each, the same at every run."""
        chance = random.Random(0)
        return [
            (chance.randint(self.low, self.high), chance.randint(self.low, self.high)) for _ in range(self.num_requests)
        ]


TINY = Workload(num_requests=3, low=5, high=12, copied_bytes=2**20, product_side=64)
"""To try the check itself on a CPU."""


def check_throughput(
    device_name: str, shape: Shape = QWEN3_0_6B, workload: Workload | None = None
) -> Iterator[Outcome]:
    """Output tokens per second, and the share of what the device's limits allow."""
    workload = workload or Workload()
    lengths = workload.lengths()
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder) / "model", "qwen3", shape)
        config = parse_model_config(open_model(path))
        settings = Settings(
            model=str(path), load_format="dummy", device=device_name, dtype="bfloat16", instance="0",
            max_model_len=2 * workload.high, max_running_requests=workload.num_requests,
            kv_cache_tokens=sum(prompt + answer + 16 for prompt, answer in lengths),
        )  # fmt: skip
        found, seconds = answers(settings, [_submit(number, *pair) for number, pair in enumerate(lengths)])
    num_tokens = sum(answer for _, answer in lengths)
    is_whole = [len(answer) for answer in found] == [answer for _, answer in lengths]
    yield held("throughput, answers are whole", is_whole, f"{len(found)} answers, {num_tokens:,} tokens")
    limits = measure_limits(torch.device(device_name), workload.copied_bytes, workload.product_side)
    least_s = _least_s(lengths, cost_of(config, torch.bfloat16), limits)
    yield measured(
        f"throughput, {len(lengths)} requests",
        f"{num_tokens / seconds:,.0f} tokens/s (>= 25,000), {least_s / seconds:.1%} of the limit (>= 60%)",
    )


def _submit(number: int, prompt: int, answer: int) -> Submit:
    ids = [(7 * number + at) % 100 for at in range(prompt)]
    return submit_of(number + 1, ids, SamplingParams(0.6, 1.0, 0, 0.0, number, 0), answer)


def _least_s(lengths: list[tuple[int, int]], cost: ModelCost, limits: MachineLimits) -> float:
    """Seconds that the device needs at least: every prompt at once, then all answers together, a token each a step."""
    prefill = sum(cost.prefill_operations(prompt) for prompt, _ in lengths) / limits.operations_per_s
    num_steps = max(answer for _, answer in lengths)
    contexts = sum(answer * prompt + answer * (answer + 1) // 2 for prompt, answer in lengths)
    read = num_steps * cost.weight_bytes + contexts * cost.kv_bytes_per_token
    return prefill + read / limits.bytes_per_s
