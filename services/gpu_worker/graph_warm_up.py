"""gpu_worker: recording decode at the start of a worker: whether, how much, and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

import torch

from services.gpu_worker.decode_graphs import GraphLimits, batch_sizes
from services.gpu_worker.graph_device import CudaGraphDevice, GraphDevice
from services.gpu_worker.model_runner import ModelRunner
from services.runtime.config import Settings
from services.runtime.service import StartError

_LOG_EVERY_S = 2.0

logger = logging.getLogger(__name__)


def graph_device(settings: Settings, runner: ModelRunner) -> GraphDevice | None:
    """What records decode, or None: not a CUDA device, not wanted, or the attention cannot be recorded."""
    device = runner.kv_cache.keys.device
    if device.type != "cuda" or not settings.cuda_graphs:
        return None
    if not runner.can_record_decode:
        logger.warning("CUDA graphs: none, this attention backend cannot be recorded")
        return None
    return CudaGraphDevice(device)


def record_graphs(runner: ModelRunner, limits: GraphLimits, device: GraphDevice, pump: Callable[[], None]) -> None:
    """Records the ladder of batch sizes.

    Args:
        runner: over the pool that is served from.
        limits: of what is served.
        device: see `graph_device`.
        pump: called after each recording, to say that this process lives.

    Raises:
        StartError: the device could not; nothing of the runner can be used then.
    """
    sizes = batch_sizes(limits.max_rows)
    begin = told = perf_counter()
    num_recorded = 0

    def tell(size: int) -> None:
        nonlocal told, num_recorded
        pump()
        num_recorded += 1
        if perf_counter() - told > _LOG_EVERY_S:
            told = perf_counter()
            logger.info("CUDA graphs: %d of %d recorded, down to %d rows", num_recorded, len(sizes), size)

    try:
        runner.record_decode(limits, device, tell)
    except RuntimeError as error:
        what = "no memory" if isinstance(error, torch.OutOfMemoryError) else str(error).splitlines()[0]
        raise StartError(
            f"CUDA graphs cannot be recorded ({what}): --no-cuda-graphs serves without them, a smaller "
            "--mem-fraction-static or --max-running-requests leaves them more memory"
        ) from error
    logger.info("CUDA graphs: %d sizes up to %d rows in %.1f s", len(sizes), sizes[-1], perf_counter() - begin)


def record_decode_layers(runner: ModelRunner, limits: GraphLimits, pump: Callable[[], None]) -> None:
    """On a CPU: records the layers of steps of few rows, where they are made of compiled loops.

    Args:
        runner: over the pool that is served from.
        limits: of what is served.
        pump: see `record_graphs`.
    """
    begin = perf_counter()
    if (recorded := runner.record_layers(limits, pump)) is not None:
        logger.info("decode: layers recorded up to %d rows in %.1f s", recorded.most_rows, perf_counter() - begin)
