"""gpu_worker: what ranks that share a model must have in common, and how many pages each of them can hold."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from services.gpu_worker.kv_cache import KvCacheShape
from services.gpu_worker.memory import MemoryState, pool_size
from services.gpu_worker.parallel.commands import Command, Operation
from services.gpu_worker.parallel.group import RankGroup
from services.runtime.config import Settings

logger = logging.getLogger(__name__)


def facts_of(settings: Settings, digest: str, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What is compared, by what people know it by."""
    names = (
        "page_size",
        "max_model_len",
        "max_running_requests",
        "kv_cache_tokens",
        "numerics",
        "cuda_graphs",
        "quantization",
        "kv_cache_dtype",
    )
    own = {f"--{name.replace('_', '-')}": str(getattr(settings, name)) for name in names}
    types = {"the device": device.type, "the dtype": str(dtype).removeprefix("torch.")}
    return {"the model's files": digest, "the release of torch": torch.__version__} | types | own


def agreed_pages(
    group: RankGroup, memory: MemoryState, shape: KvCacheShape, settings: Settings, max_model_len: int
) -> int:
    """How many pages the pool of each rank gets: as many as on the one with the least room. All ranks ask together."""
    memory = replace(memory, num_ranks=group.place.local_size)
    if group.is_leading:
        group.send(Command(Operation.MAKE_POOL, [memory.activations]))
    pool = pool_size(memory, shape, settings, max_model_len)
    for line in pool.lines:
        logger.info(line)
    num_pages = group.least(pool.num_pages)
    if num_pages < pool.num_pages:
        logger.info("memory: %d pages, as many as there is room for on all ranks", num_pages)
    return num_pages
