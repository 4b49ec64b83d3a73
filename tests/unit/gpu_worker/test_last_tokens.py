"""The newest tokens of rows: the way by numpy gives what the way by torch, of other devices, gives."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.last_tokens import LastTokens
from services.gpu_worker.row_lines import Picks

MAX_ROWS = 6


def picks(rows: list[int]) -> Picks:
    numbers = np.arange(len(rows))
    return Picks(numbers, numbers[::-1].copy(), np.array(rows, dtype=np.int64), numbers, numbers)


@given(st.lists(st.lists(st.integers(0, MAX_ROWS - 1), unique=True, max_size=MAX_ROWS), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_both_ways_are_the_same(steps: list[list[int]]) -> None:
    on_host, by_torch = (LastTokens(MAX_ROWS, torch.device("cpu")) for _ in range(2))
    by_torch._on_host = None
    expected = [0] * MAX_ROWS
    for number, rows in enumerate(steps):
        token_ids = torch.arange(len(rows)) + 100 * number
        for place, row in enumerate(rows):
            expected[row] = int(token_ids[len(rows) - 1 - place])
        for tokens in (on_host, by_torch):
            tokens.keep(picks(rows), token_ids)
            wanted = np.array(rows, dtype=np.int64)
            ids, other = tokens.upload_inputs(np.full(len(rows) + 1, 7), (np.arange(len(rows)), wanted), [wanted])
            assert ids.tolist() == [*(expected[row] for row in rows), 7]
            assert other.tolist() == rows
