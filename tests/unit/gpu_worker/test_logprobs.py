"""Log-probabilities of raw logits: values, order, and what is not a number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.gpu_worker import logprobs
from services.gpu_worker.logprobs import LogprobsTable, highest, row_logprobs, top_logprobs
from services.gpu_worker.row_lines import Picks
from services.wire.request_params import SamplingParams

CPU = torch.device("cpu")


def test_smp_15_unit_values() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.5]] * 4)
    found = top_logprobs(logits, torch.arange(4), 4)
    assert found.own.tolist() == pytest.approx([-0.4952, -1.4952, -3.4952, -1.9952], abs=1e-4)
    assert found.ids.tolist() == [[0, 1, 3, 2]] * 4
    assert found.values[0].tolist() == pytest.approx([-0.4952, -1.4952, -1.9952, -3.4952], abs=1e-4)


@pytest.mark.parametrize("vocab_size", [1, 3, 255, 256, 257, 511, 700, 49_152])
@pytest.mark.parametrize("width", [0, 1, 2, 20])
def test_the_highest_equal_a_full_sort_with_ties_by_id(vocab_size: int, width: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator).mul(2).round()  # many equal ones
    logits[1] = torch.where(logits[1] > 0, -0.0, 0.0)
    logits[2, vocab_size // 2 :] = -math.inf
    width = min(width, vocab_size)
    values, ids = highest(logits, width)
    for row in range(3):
        order = sorted(range(vocab_size), key=lambda at, row=row: (-float(logits[row, at]), at))[:width]  # type: ignore[misc]
        assert ids[row].tolist() == order
        assert torch.equal(values[row], logits[row, order])


def test_smp_15_values_equal_log_softmax() -> None:
    logits = torch.randn(5, 1000) * 4
    token_ids = torch.tensor([0, 999, 5, 500, 256])
    expected = logits.log_softmax(1)
    found = top_logprobs(logits.clone(), token_ids, 20)
    assert torch.allclose(found.own, expected.gather(1, token_ids[:, None]).squeeze(1), atol=1e-5)
    assert torch.allclose(found.values, expected.topk(20, dim=1).values, atol=1e-5)
    assert (found.values <= 0).all()


def test_smp_14_no_nan_reaches_a_column() -> None:
    logits = torch.randn(4, 300)
    logits[0] = math.nan
    logits[1, ::2] = math.nan
    logits[2, 7] = math.inf
    logits[3] = -math.inf
    found = top_logprobs(logits.clone(), torch.tensor([0, 2, 8, 0]), 5)
    assert not found.own.isnan().any()
    assert not found.values.isnan().any()
    assert found.own[1] == -math.inf
    assert (found.ids[1] % 2 == 1).all()
    assert torch.isfinite(found.values[1]).all()


def test_only_rows_that_ask_are_looked_at_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = LogprobsTable(6, CPU)
    for row, wanted in enumerate([-1, 0, 3, -1, 1, 2]):
        table.set_row(row, SamplingParams(0.0, 1.0, 0, 0.0, 0, 0, num_logprobs=wanted))
    at = np.arange(3, dtype=np.int64)
    assert table.among(Picks(at[:2], at[:2], np.array([0, 3]), at[:2], at[:2])) is None
    rows = np.array([2, 0, 5])
    asking = table.among(Picks(at, at, rows, at, at))
    assert asking is not None
    assert (asking.places.tolist(), asking.num_top.tolist(), asking.width) == ([0, 2], [3, 2], 3)
    logits, token_ids = torch.randn(3, 50), torch.tensor([4, 5, 6])
    before = logits.clone()
    (whole,) = row_logprobs(logits, token_ids, asking)
    assert torch.equal(logits, before)
    monkeypatch.setattr(logprobs, "MAX_BLOCK", 50)
    first, second = row_logprobs(logits, token_ids, asking)
    assert torch.equal(torch.cat([first.top.values, second.top.values]), whole.top.values)
    assert [first.places.tolist(), second.places.tolist()] == [[0], [2]]
    assert torch.allclose(whole.top.own, before.log_softmax(1)[[0, 2], [4, 6]], atol=1e-6)
