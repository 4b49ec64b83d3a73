"""gpu_worker: a model without its weights, to measure with: its configuration's shapes, small random numbers in them.

Every step costs what it costs with the real weights; the answers mean nothing. No file but the configuration is read.
"""

from __future__ import annotations

from time import perf_counter

import torch

from services.gpu_worker.models.checkpoint_layout import allocate_weights, placements
from services.gpu_worker.models.parse_config import parse_model_config
from services.gpu_worker.parallel.shards import undivided
from services.gpu_worker.weights import LoadedModel, LoadReport, Split, default_dtype
from services.model_files.source import ModelFiles

_SPREAD = 0.02  # of most models before training: sums of any width stay small


@torch.inference_mode()
def dummy_model(
    files: ModelFiles, device: torch.device, dtype: torch.dtype | None = None, split: Split = undivided
) -> LoadedModel:
    """The same numbers at every start, on every device of a kind.

    Args:
        files: config.json, or a GGUF file whose header has the configuration.
        device: where the weights go.
        dtype: of the weights; None: as `load_model` chooses.
        split: which part of the model this process holds.

    Raises:
        StartError: of `split`.
        ModelFileError: the configuration is not supported.
    """
    began = perf_counter()
    shard = split(parse_model_config(files))
    layout = shard.layout
    weights = allocate_weights(layout, dtype or default_dtype(layout, device), device)
    generator = torch.Generator(device).manual_seed(0)
    num_bytes = 0
    for item in placements(layout, weights):
        num_bytes += item.target.nbytes
        if "norm" in item.name:
            item.target.fill_(1.0)
        else:
            item.target.normal_(0.0, _SPREAD, generator=generator)
    report = LoadReport(
        num_bytes_read=0,
        disk_s=0.0,
        decode_s=0.0,
        num_bytes_placed=num_bytes,
        place_s=0.0,
        total_s=perf_counter() - began,
    )
    return LoadedModel(shard.config, weights, report)
