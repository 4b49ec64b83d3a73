"""What a device can do at most, measured as the worker does; and what a step of a model asks of it, computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from services.gpu_worker.machine_limits import MachineLimits, measure_products, measure_reading
from services.gpu_worker.models.config import ModelConfig

_REPEATS = 10


def measure_limits(device: torch.device, num_bytes: int, side: int) -> MachineLimits:
    """Of so many bytes, and of bfloat16 products of two square matrices."""
    products = measure_products(device, torch.bfloat16, side)
    return MachineLimits(measure_reading(device, num_bytes).best, products.best)


def median_s(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of a run, the first one not counted."""
    times = []
    for _ in range(_REPEATS + 1):
        wait_for(device)
        begin = perf_counter()
        run()
        wait_for(device)
        times.append(perf_counter() - begin)
    return median(times[1:])


def wait_for(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class ModelCost:
    """What a model's steps cost at least.

    Attributes:
        weight_bytes: read by every step: all matrices but the embedding, of which a step reads a few lines.
        kv_bytes_per_token: keys and values of one token in all layers.
        matrix_operations_per_token: of the layers' products.
        attention_operations_per_pair: of all layers, for one new token and one token it attends to.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    matrix_operations_per_token: int
    attention_operations_per_pair: int

    def decode_bytes(self, contexts: list[int]) -> int:
        """Bytes that a decode of rows with so many tokens each must read."""
        return self.weight_bytes + sum(contexts) * self.kv_bytes_per_token

    def prefill_operations(self, num_tokens: int) -> int:
        """Operations of a whole prompt in one step, the head for its last token aside."""
        pairs = num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.matrix_operations_per_token + pairs * self.attention_operations_per_pair


def cost_of(config: ModelConfig, dtype: torch.dtype) -> ModelCost:
    """From the configuration; a window is not looked at."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    per_layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    layers = config.num_layers * per_layer
    return ModelCost(
        weight_bytes=(layers + config.vocab_size * config.hidden_size) * dtype.itemsize,
        kv_bytes_per_token=2 * config.num_layers * keys * dtype.itemsize,
        matrix_operations_per_token=2 * layers,
        attention_operations_per_pair=4 * config.num_layers * queries,
    )
