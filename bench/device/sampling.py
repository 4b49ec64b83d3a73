"""The sampler on a device against itself on the CPU, on the same logits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from bench.device.report import Outcome, held
from services.gpu_worker.sampler import SampledTokens, sample
from services.gpu_worker.sampling_table import SamplingTable
from services.wire.request_params import SamplingParams

_KINDS = {
    "greedy": SamplingParams(0.0, 1.0, 0, 0.0, 0, 0),
    "temperature": SamplingParams(0.9, 1.0, 0, 0.0, 0, 0),
    "min_p": SamplingParams(1.0, 1.0, 0, 0.05, 0, 0),
    "top_p": SamplingParams(1.0, 0.9, 0, 0.0, 0, 0),
    "top_k and top_p": SamplingParams(0.7, 0.8, 20, 0.0, 0, 0),
}
_NUM_ROWS, _VOCAB_SIZE, _NUM_DRAWS = 64, 8192, 16


def check_sampler(device: torch.device) -> Iterator[Outcome]:
    """Every way to sample; rows that fail among them.

    An exponential may differ in its last bit from one device to the other, which moves a boundary by a ten-millionth:
    one token of thousands may differ, no more.
    """
    generator = torch.Generator().manual_seed(4)
    for name, params in _KINDS.items():
        rows = [SamplingParams(params.temperature, params.top_p, params.top_k, params.min_p, seed - 9, 1)
                for seed in range(_NUM_ROWS)]  # fmt: skip
        num_different = num_failed = 0
        for draw in range(_NUM_DRAWS):
            logits = (torch.randn(_NUM_ROWS, _VOCAB_SIZE, generator=generator) * 3).bfloat16().float()
            logits[draw] = float("nan")
            logits[draw + 20, 7] = float("inf")
            logits[draw + 40, ::3] = float("nan")
            expected, found = _sample(logits, rows, draw, torch.device("cpu")), _sample(logits, rows, draw, device)
            num_different += int((found.token_ids.cpu() != expected.token_ids).sum())
            num_failed += int((found.is_failed.cpu() != expected.is_failed).sum())
        figure = f"{num_different} of {_NUM_ROWS * _NUM_DRAWS} tokens differ, {num_failed} failures"
        yield held(f"sampler, {name}", num_different <= 1 and num_failed == 0, figure)


def _sample(logits: torch.Tensor, rows: list[SamplingParams], position: int, device: torch.device) -> SampledTokens:
    table = SamplingTable(len(rows), device)
    table.set_rows(range(len(rows)), rows)
    numbers = np.arange(len(rows), dtype=np.int64)
    return sample(logits.to(device), table.groups(numbers, np.full(len(rows), position, dtype=np.int64)))
