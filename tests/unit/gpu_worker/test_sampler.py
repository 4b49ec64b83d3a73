"""The sampler: its rules case by case."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.fused_sampler import Sampler, sampler_for
from services.gpu_worker.sampler import SampledTokens, row_maxima, sample
from services.gpu_worker.sampling_table import SamplingTable
from services.wire.request_params import SamplingParams

CPU = torch.device("cpu")
needs_loops = pytest.mark.skipif(bool(loops_problem()), reason=str(loops_problem()))


def row(temperature: float = 1.0, **changes: float) -> SamplingParams:
    """How one row samples; everything else off."""
    values = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 42, "choice": 0} | changes
    return SamplingParams(
        temperature, values["top_p"], int(values["top_k"]), values["min_p"], int(values["seed"]), int(values["choice"])
    )  # fmt: skip


@pytest.fixture(autouse=True, params=["plain", pytest.param("loop", marks=needs_loops)])
def _sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule holds for both samplers."""
    monkeypatch.setattr(f"{__name__}.pick", sample if request.param == "plain" else sampler_for(CPU))


pick: Sampler = sample


def sampled(logits: Tensor, rows: Sequence[SamplingParams], positions: Sequence[int] | None = None) -> SampledTokens:
    table = SamplingTable(len(rows), CPU)
    table.set_rows(range(len(rows)), rows)
    at = np.asarray(positions if positions is not None else [0] * len(rows), dtype=np.int64)
    return pick(logits, table.groups(np.arange(len(rows)), at))


def draw(logits: Tensor, rows: Sequence[SamplingParams], positions: Sequence[int] | None = None) -> list[int]:
    """The tokens of rows that must not fail."""
    found = sampled(logits, rows, positions)
    assert not found.is_failed.any()
    ids: list[int] = found.token_ids.tolist()
    return ids


def distribution(logits: Sequence[float], params: SamplingParams, draws: int = 10_000) -> dict[int, float]:
    """How often each token comes, over many positions."""
    counts = Counter(draw(torch.tensor([logits]).expand(draws, -1), [params] * draws, range(draws)))
    return {token: count / draws for token, count in counts.items()}


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-12, 1e-45])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_smp_01_tiny_temperature_is_greedy_and_never_nan(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[2, 1, -1, 0.5]], dtype=dtype).float()
    for seed in range(50):
        assert draw(logits, [row(temperature, seed=seed)]) == [0]
        assert draw(logits * 1e30, [row(temperature, top_p=0.9, seed=seed)]) == [0]


@pytest.mark.parametrize("params", [row(0.0), row(1.0), row(1.0, top_p=0.9), row(1.0, top_k=3)])
@pytest.mark.parametrize("poison", [[math.nan] * 6, [1.0, 2.0, math.inf, 0.0, 0.0, 0.0], [-math.inf] * 6])
def test_smp_02_row_without_finite_maximum_fails_alone(params: SamplingParams, poison: list[float]) -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    alone = [draw(logits[i : i + 1], [params])[0] for i in (0, 2)]
    logits[1] = torch.tensor(poison)
    found = sampled(logits, [params] * 3)
    assert found.is_failed.tolist() == [False, True, False]
    assert found.token_ids[[0, 2]].tolist() == alone
    assert found.token_ids[1] == 0


@pytest.mark.parametrize("params", [row(0.0), row(1.0), row(5.0, top_p=0.99), row(5.0, top_k=5), row(5.0, min_p=0.001)])
def test_smp_02_nan_lanes_of_a_usable_row_have_probability_0(params: SamplingParams) -> None:
    logits = torch.tensor([[1.0, math.nan, 2.0, math.nan, 0.5], [1.0, 0.0, 2.0, 0.0, 0.5]])
    seen: set[int] = set()
    for position in range(300):
        seen.add(draw(logits, [params, row()], [position, 0])[0])
    assert seen <= {0, 2, 4}
    assert 2 in seen
    without = torch.tensor([[1.0, -math.inf, 2.0, -math.inf, 0.5]])
    assert draw(without, [params]) == draw(logits, [params, row()])[:1]


def test_smp_06_top_p_0_is_greedy() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.15, 0.0]])
    for seed in range(50):
        assert draw(logits, [row(1.0, top_p=0.0, seed=seed)]) == [1]
        assert draw(logits, [row(0.0, top_p=0.0, seed=seed)]) == [1]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, 1), (0.4, 1), (0.5, 1), (0.6, 2), (0.75, 2), (0.76, 3), (0.9, 4), (1.0, 5)]
)
@pytest.mark.parametrize("with_top_k", [False, True])
def test_smp_07_nucleus_boundary(top_p: float, kept: int, with_top_k: bool) -> None:
    probabilities = [0.5, 0.25, 0.125, 0.0625, 0.0625]
    params = row(1.0, top_p=top_p, top_k=5 if with_top_k else 0)
    found = distribution([math.log(p) for p in probabilities], params)
    assert set(found) == set(range(kept))
    mass = sum(probabilities[:kept])
    for token in range(kept):
        assert found[token] == pytest.approx(probabilities[token] / mass, abs=0.02)


@pytest.mark.parametrize("top_k", [0, 6, 10**6])
def test_smp_08_top_k_off_or_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    assert set(distribution([0.0] * 6, row(2.0, top_k=top_k), draws=2000)) == set(range(6))


def test_smp_08_top_k_1_is_greedy_at_any_temperature() -> None:
    logits = torch.tensor([[1.0, 1.0000001, 1.0, 0.9]])
    for seed in range(100):
        assert draw(logits, [row(2.0, top_k=1, seed=seed)]) == draw(logits, [row(0.0)]) == [1]


def test_top_k_keeps_exactly_k_when_logits_tie() -> None:
    assert set(distribution([1.0, 3.0, 3.0, 3.0, 3.0, 0.0], row(1.0, top_k=2), draws=2000)) == {1, 2}


def test_top_k_beyond_what_is_selected_before_sorting() -> None:
    logits = torch.linspace(0, 0.01, 2500)
    found = distribution(logits.tolist(), row(1.0, top_k=1500), draws=2000)
    assert min(found) >= 1000
    assert len(found) > 1000


def test_min_p_is_relative_to_the_most_probable() -> None:
    probabilities = [0.5, 0.25, 0.125, 0.0625, 0.0625]
    logits = [math.log(p) for p in probabilities]
    assert set(distribution(logits, row(min_p=0.2), draws=3000)) == {0, 1, 2}
    assert set(distribution(logits, row(min_p=0.2, top_k=2), draws=3000)) == {0, 1}
    assert set(distribution(logits, row(min_p=1.0), draws=300)) == {0}


def test_temperature_flattens() -> None:
    found = distribution([math.log(0.8), math.log(0.2)], row(2.0))
    assert found[0] == pytest.approx(2 / 3, abs=0.02)  # sqrt(.8) : sqrt(.2) = 2 : 1


def test_equal_logits_give_the_first_id_to_greedy_rows() -> None:
    logits = torch.zeros(2, 600)
    logits[0, [270, 300, 599]] = 1
    logits[1, [598, 599]] = 1
    assert draw(logits, [row(0.0)] * 2) == [270, 598]


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 511, 1000, 49_152])
def test_row_maxima_equal_the_plain_reduction(vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0)).mul(3).round()
    values, ids = row_maxima(logits)
    assert torch.equal(values, logits.amax(1))
    assert torch.equal(ids, logits.argmax(1))


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(4, 300)
    before = logits.clone()
    draw(logits, [row(0.0), row(), row(top_p=0.5), row(top_k=4, min_p=0.1)])
    assert torch.equal(logits, before)
