"""gpu_worker: on a CPU, the whole sampler as one compiled loop whose threads share the rows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.cpu_loops.sampling_loop import SAMPLE, scratch_bytes
from services.gpu_worker.cpu_loops.team import LARGE_WORK, TEAM
from services.gpu_worker.sampler import DrawnRows, SampledTokens


def sample_by_loop(logits: Tensor, groups: Sequence[DrawnRows]) -> SampledTokens:
    """See `sampler.sample`; on a CPU. Weights may differ from those there in the last bits of a float32."""
    assert TEAM is not None
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    columns = _joined(groups)
    # Made by numpy: between steps that read all weights, less of its code has to come from memory.
    token_ids = torch.from_numpy(np.empty(num_rows, dtype=np.int64))
    is_failed = torch.from_numpy(np.empty(num_rows, dtype=np.bool_))
    is_large = num_rows > 1 and num_rows * vocab_size >= LARGE_WORK
    bytes_of_thread = scratch_bytes(num_rows, vocab_size)
    scratch = TEAM.scratch(bytes_of_thread * (torch.get_num_threads() if is_large else 1))
    numbers = (
        logits.data_ptr(), logits.stride(0), num_rows, vocab_size,
        0 if columns is None else columns.data_ptr(), 0 if columns is None else columns.shape[1],
        token_ids.data_ptr(), is_failed.data_ptr(), scratch, bytes_of_thread,
    )  # fmt: skip
    TEAM.run(SAMPLE, array("q", numbers), is_large)
    return SampledTokens(token_ids, is_failed)


def _joined(groups: Sequence[DrawnRows]) -> Tensor | None:
    """The columns of all rows that draw; None: no row does."""
    if not groups:
        return None
    if len(groups) == 1:
        return groups[0].columns.contiguous()
    return torch.cat([each.columns for each in groups], dim=1)
