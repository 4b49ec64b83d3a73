"""The sampler as a compiled loop against the plain one: weights but for their last bits, and then the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.gpu_worker import draw, nucleus, sampler
from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.fused_sampler import sampler_for
from services.gpu_worker.sampler import SampledTokens
from services.gpu_worker.sampling_table import Kind, SamplingTable, kind_of
from services.wire.request_params import SamplingParams

pytestmark = pytest.mark.skipif(bool(loops_problem()), reason=str(loops_problem()))
CPU = torch.device("cpu")
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 10.0]),
    top_p=st.sampled_from([1e-9, 0.2, 0.5, 0.9, 0.999999, 1.0]),
    top_k=st.sampled_from([0, 2, 3, 17, 300, 10**6]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 7),
)
FAILING = (math.nan, math.inf, -math.inf)


@dataclass(frozen=True)
class Wild:
    """Logits as no model gives them all: flat or peaked, many equal, some banned, some NaN, whole rows of no use."""

    seed: int
    scale: float
    decimals: int | None
    share_banned: float
    share_nan: float
    poison: float | None

    def logits(self, num_rows: int, vocab_size: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        logits = torch.randn(num_rows, vocab_size, generator=generator) * self.scale
        if self.decimals is not None:
            logits = logits.round(decimals=self.decimals)
        for share, value in ((self.share_banned, -math.inf), (self.share_nan, math.nan)):
            is_changed = torch.rand(logits.shape, generator=generator) < share
            is_changed[:, self.seed % vocab_size] = False
            logits = logits.masked_fill(is_changed, value)
        if self.poison is not None:
            row = self.seed % num_rows
            logits[row, :: 1 if self.poison != math.inf else 7] = self.poison
        return logits


WILD = st.builds(
    Wild,
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 0.3, 2.0, 9.0, 1e4]),
    decimals=st.sampled_from([None, 0, 2]),
    share_banned=st.sampled_from([0.0, 0.5, 0.99]),
    share_nan=st.sampled_from([0.0, 0.0, 0.3]),
    poison=st.sampled_from([None, None, *FAILING]),
)


def by_loop(logits: Tensor, rows: Sequence[SamplingParams], positions: Sequence[int]) -> SampledTokens:
    table = SamplingTable(len(rows), CPU)
    table.set_rows(range(len(rows)), rows)
    return sampler_for(CPU)(logits, table.groups(np.arange(len(rows)), np.asarray(positions, dtype=np.int64)))


def weighed(logits: Tensor, temperature: float) -> tuple[Tensor, int]:
    """The loop's weights of one row before they are rounded down, and their sum: [vocab_size] float32."""
    from services.gpu_worker.cpu_loops.probable import weigh

    weights = np.empty(len(logits), dtype=np.float32)
    most = np.float32(logits[~logits.isnan()].max())
    total = weigh(logits.numpy(), len(logits), most, np.float32(temperature), weights)
    return torch.from_numpy(weights), int(total)


def expected_token(logits: Tensor, params: SamplingParams, position: int) -> int:
    """What the plain sampler's parts make of the loop's weights: everything is sorted, nothing is rounded."""
    logits = logits.masked_fill(logits.isnan(), -math.inf)
    if kind_of(params) == Kind.GREEDY:
        return int(logits.argmax())
    table = SamplingTable(1, CPU)
    table.set_rows([0], [params])
    (drawn,) = table.groups(np.zeros(1, dtype=np.int64), np.array([position]))
    exponents = (logits - logits.max())[None]
    weights = sampler.fixed_point_weights(weighed(logits, params.temperature)[0][None])
    kept = nucleus.most_probable(exponents, weights, drawn.limits)
    place = draw.draw_places(kept.weights, kept.ids, drawn.keys, drawn.positions)
    return int(kept.ids.gather(1, place))


@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(1, 1500), WILD, st.integers(0, 2**31 - 1))
@settings(max_examples=250, deadline=None)
def test_draws_what_the_plain_sampler_draws_of_the_same_weights(
    rows: list[SamplingParams], vocab_size: int, wild: Wild, position: int
) -> None:
    logits = wild.logits(len(rows), vocab_size)
    before = logits.clone()
    found = by_loop(logits, rows, [position + i for i in range(len(rows))])
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    for i, params in enumerate(rows):
        usable = logits[i].masked_fill(logits[i].isnan(), -math.inf)
        is_failed = not math.isfinite(usable.max())
        assert bool(found.is_failed[i]) == is_failed
        assert int(found.token_ids[i]) == (0 if is_failed else expected_token(logits[i], params, position + i))


@given(st.integers(1, 6000), WILD, st.sampled_from([0.02, 0.7, 1.0, 10.0]))
@settings(max_examples=100, deadline=None)
def test_weights_are_the_plain_ones_but_for_their_last_bits(vocab_size: int, wild: Wild, temperature: float) -> None:
    logits = wild.logits(1, vocab_size)[0]
    logits = logits.masked_fill(logits == math.inf, 0.0)
    logits[0] = 0.0  # there is a largest one
    weights, total = weighed(logits, temperature)
    assert total == int(weights.to(torch.int64).sum())
    usable = logits.masked_fill(logits.isnan(), -math.inf)
    plain = sampler.unrounded_weights((usable - usable.max())[None], torch.tensor([temperature]))[0]
    torch.testing.assert_close(weights, plain, rtol=4e-7, atol=1e-3)
    assert weights.max() == 2.0**nucleus.WEIGHT_BITS


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize(
    ("top_p", "top_k"), [(1.0, 0), (0.1, 0), (0.9, 0), (0.9999999, 0), (1.0, 50), (0.8, 20), (1.0, 1500), (0.9, 15_000)]
)
def test_a_large_vocabulary_has_the_tokens_of_the_plain_sampler(scale: float, top_p: float, top_k: int) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(6, 20_011, generator=generator) * scale).bfloat16().float()  # bfloat16: many equal logits
    rows = [SamplingParams(1.0, top_p, top_k, 0.0, seed, 0) for seed in range(6)]
    found = by_loop(logits, rows, range(6)).token_ids.tolist()
    assert found == [expected_token(logits[i], rows[i], i) for i in range(6)]


def test_threads_and_neighbours_change_no_token() -> None:
    logits = torch.randn(9, 30_011, generator=torch.Generator().manual_seed(2)) * 3
    rows = [SamplingParams([0.0, 0.7, 1.3][i % 3], [1.0, 0.9][i % 2], [0, 40][i // 5], 0.0, i, 0) for i in range(9)]
    alone = [int(by_loop(logits[i : i + 1], rows[i : i + 1], [i]).token_ids) for i in range(9)]
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            assert by_loop(logits, rows, range(9)).token_ids.tolist() == alone
    finally:
        torch.set_num_threads(before)


def test_rows_that_lie_apart_are_the_same_rows() -> None:
    logits = torch.randn(3, 900, generator=torch.Generator().manual_seed(3))
    rows = [SamplingParams(1.0, 0.9, 0, 0.0, i, 0) for i in range(3)]
    expected = by_loop(logits, rows, range(3)).token_ids.tolist()
    apart = torch.zeros(3, 2, 900)
    apart[:, 1] = logits
    assert by_loop(apart[:, 1], rows, range(3)).token_ids.tolist() == expected
    assert by_loop(logits.T.contiguous().T, rows, range(3)).token_ids.tolist() == expected


def test_no_row_is_no_token() -> None:
    assert len(by_loop(torch.zeros(0, 50), [], []).token_ids) == 0
