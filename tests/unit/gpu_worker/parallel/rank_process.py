"""One rank of a group of two, as a process: `python -m ... DIRECTORY`; its place is in the environment, as torchrun's.

For each folder `DIRECTORY/NAME/` the ranks compute the same steps; rank 0 leaves the logits in `DIRECTORY/NAME.npy`.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import torch

from services.gpu_worker.attention.paged_cpu import PagedCpuAttention, reads_halves
from services.gpu_worker.kv_cache import KvCacheShape
from services.gpu_worker.models.operators import PlainOperators
from services.gpu_worker.parallel.commands import Command, Operation
from services.gpu_worker.parallel.following import Follower
from services.gpu_worker.parallel.group import RankGroup, meet
from services.gpu_worker.parallel.shards import split_model
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.roofline import Loaded
from services.gpu_worker.start_up import ModelParts
from services.gpu_worker.weights import RunnableModel, load_laid_out, load_model
from services.model_files.source import open_model
from services.runtime.config import Settings
from services.runtime.rank_place import rank_place
from services.runtime.service import Process
from services.wire.endpoints import Identity
from services.wire.members import Role
from tests.unit.gpu_worker.parallel.two_ranks import PAGE_SIZE, is_exact, run_steps

CPU = torch.device("cpu")


def main(directory: Path) -> None:
    """Goes through the models, this rank leading or following."""
    place = rank_place()
    assert place is not None
    torch.set_num_threads(1)
    group = meet(place, CPU, lambda: None)
    for folder in sorted(directory.iterdir()):
        if folder.is_dir():
            parts = _parts(folder, group)
            if group.is_leading:
                np.save(directory / f"{folder.name}.npy", run_steps(parts.runner(16)).numpy())
                group.send(Command(Operation.STOP))
            else:
                settings = Settings(model=str(folder), page_size=PAGE_SIZE)
                follower = _Follower(Process(settings, Identity(Role.GPU_WORKER, "rank")), group, parts)
                follower.serve()
    group.least(0)  # all are through
    group.close()


class _Follower(Follower):
    """One whose pool is there from the start: nothing is measured here."""

    def __init__(self, process: Process, group: RankGroup, parts: ModelParts) -> None:
        super().__init__(process, group, parts)
        self._runner = parts.runner(16)


def _parts(folder: Path, group: RankGroup) -> ModelParts:
    split = functools.partial(split_model, rank=group.place.rank, size=group.place.size)
    files = open_model(folder)
    if files.gguf is None:
        plain = load_model(files, CPU, split=split)
        model = RunnableModel(plain.config, plain.weights, plain.report)
    else:
        model = load_laid_out(files, CpuForms(is_exact(folder.name)), split=split)
    config = model.config
    # As a worker has it: what keys and values are kept in is not what the ranks exchange.
    is_half = not is_exact(folder.name) and reads_halves(config.head_dim)
    kv_dtype = torch.float16 if is_half else torch.float32
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, kv_dtype)
    return ModelParts(
        model=model,
        loaded=Loaded(model.report, None),
        digest="",
        device=CPU,
        attention=PagedCpuAttention(kv_dtype, computes_in=torch.float32),
        operators=PlainOperators(),
        shape=shape,
        max_model_len=config.max_position_embeddings,
        group=group,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
