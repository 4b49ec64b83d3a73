"""gpu_worker: what a start decides from settings, device and a model's configuration, before it reads a weight.

Settings that this device or this model cannot take are refused here and nowhere later; those that contradict each other
on any machine were refused when they were read (`runtime.setting_conflicts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from services.gpu_worker.attention import attention_problem
from services.gpu_worker.attention.fastest import AttentionTask
from services.gpu_worker.eight_bits import check_fp8_weights
from services.gpu_worker.fp8 import E4M3
from services.gpu_worker.integer_weights import check_rounding
from services.gpu_worker.kv_cache import KvCacheShape
from services.gpu_worker.kv_dtype import choose_kv_dtype
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.parallel.shards import Shard, split_model
from services.gpu_worker.products.kernels import has_fast_bfloat16
from services.gpu_worker.weights import default_dtype
from services.runtime.capacity import asked_step_problem
from services.runtime.config import Settings
from services.runtime.service import StartError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UnfitSettingError(StartError):
    """A setting does not go with this model or device; `remedy` is what would help."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Choices:
    """What a start goes on with.

    Attributes:
        shard: this process's part of the model.
        max_model_len: most tokens of a request.
        dtype: of weights that are not quantized, and of activations.
        attention: what attention is to be computed, over which pool.
    """

    shard: Shard
    max_model_len: int
    dtype: torch.dtype
    attention: AttentionTask

    @property
    def shape(self) -> KvCacheShape:
        """Of a page."""
        return self.attention.shape


def choose(settings: Settings, config: ModelConfig, device: torch.device, rank: int = 0, size: int = 1) -> Choices:
    """Decides, or refuses.

    Args:
        settings: of the process.
        config: of the whole model.
        device: where the model will be.
        rank: of the processes that share it, this one.
        size: of their group.

    Raises:
        UnfitSettingError: names the setting and what stands against it.
    """
    max_model_len = _choose_context(settings, config)
    dtype = choose_dtype(settings) or default_dtype(config, device)
    with _advice("set a lower --tp-size"):
        shard = split_model(config, rank, size)
    with _advice("leave --quantization and --kv-cache-dtype out, or run where they go"):
        check_rounding(settings, device)
        if settings.quantization == "fp8":
            check_fp8_weights(device, config, dtype)
        kv_dtype = choose_kv_dtype(settings, device, dtype, config.head_dim)
    own = shard.config
    shape = KvCacheShape(own.num_layers, own.num_kv_heads, own.head_dim, settings.page_size, kv_dtype)
    rounds_prompts = product_dtype(settings, device, dtype) == torch.bfloat16
    task = AttentionTask(device, dtype, shape, own.num_heads, rounds_prompts)
    if problem := attention_problem(settings.attention_backend, task):
        raise UnfitSettingError(f"--attention-backend {settings.attention_backend}: {problem}", "leave it out")
    return Choices(shard, max_model_len, dtype, task)


def _choose_context(settings: Settings, config: ModelConfig) -> int:
    most = config.max_position_embeddings
    if settings.max_model_len > most:
        problem = f"--max-model-len {settings.max_model_len} is more than the {most} positions"
        raise UnfitSettingError(
            f"{problem} that the model was made for", f"set --max-model-len {most} or less, or leave it out"
        )
    context = settings.max_model_len or most
    if problem := asked_step_problem(settings, context):
        raise UnfitSettingError(problem, "leave --max-num-batched-tokens or --chunked-prefill-size out")
    return context


@contextmanager
def _advice(remedy: str) -> Iterator[None]:
    try:
        yield
    except StartError as error:
        raise UnfitSettingError(str(error), remedy) from error


def choose_dtype(settings: Settings) -> torch.dtype | None:
    """What weights and activations are in; None: the device's own default."""
    return torch.float32 if settings.numerics == "exact" else DTYPES.get(settings.dtype)


def is_laid_out(settings: Settings, device: torch.device) -> bool:
    """Whether matrices are kept in forms of this machine's own: on a CPU, unless half precision was asked for."""
    return device.type == "cpu" and choose_dtype(settings) in (None, torch.float32)


def product_dtype(settings: Settings, device: torch.device, weights: torch.dtype) -> torch.dtype:
    """What most products are computed in, where weights that are not quantized are in this dtype."""
    if settings.quantization == "fp8":
        return E4M3
    may_round = is_laid_out(settings, device) and settings.numerics == "fast"
    return torch.bfloat16 if may_round and has_fast_bfloat16() else weights
