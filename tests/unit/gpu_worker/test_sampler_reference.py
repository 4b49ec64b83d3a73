"""The sampler against a slow and obvious one, beside any neighbours; and the statistics of what it draws."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.gpu_worker import draw, likely_tokens, nucleus, sampler
from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.fused_sampler import Sampler, sampler_for
from services.gpu_worker.random_numbers import key_at, number_at, numbers_at, stream_key, stream_key_at, uniform
from services.gpu_worker.sampler import DrawnRows, SampledTokens, sample
from services.gpu_worker.sampling_table import Kind, SamplingTable, kind_of
from services.wire.request_params import SamplingParams

INT64S = st.integers(-(2**63), 2**63 - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.7, 10.0]),
    top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.9, 0.999999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 10**6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=INT64S,
    choice=st.integers(0, 7),
)


def sample_by_loop(logits: Tensor, groups: Sequence[DrawnRows]) -> SampledTokens:
    """What a worker takes here; found when it is needed, because it may have to be compiled."""
    return sampler_for(torch.device("cpu"))(logits, groups)


SAMPLERS = [sample] if loops_problem() else [sample, sample_by_loop]


def sample_all(
    logits: Tensor, rows: Sequence[SamplingParams], positions: Sequence[int], pick: Sampler = sample
) -> list[int]:
    """What a sampler picks for a batch."""
    table = SamplingTable(len(rows), torch.device("cpu"))
    table.set_rows(range(len(rows)), rows)
    groups = table.groups(np.arange(len(rows)), np.asarray(positions, dtype=np.int64))
    ids: list[int] = pick(logits, groups).token_ids.tolist()
    return ids


def sample_slowly(logits: list[float], params: SamplingParams, position: int) -> int:
    """One row in plain Python numbers: sort all tokens, keep those that may be drawn, walk up the running sum."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if kind_of(params) == Kind.GREEDY:
        return order[0]
    maximum = torch.tensor(logits[order[0]])
    probabilities = torch.exp((torch.tensor(logits) - maximum) / torch.tensor(params.temperature))
    weights = [int(weight) for weight in (probabilities.double() * 2**40).tolist()]
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        total, before = sum(weights[token] for token in kept), 0
        nucleus_tokens: list[int] = []
        for token in kept:
            if nucleus_tokens and before >= (params.top_p - 2**-20) * total:
                break
            nucleus_tokens.append(token)
            before += weights[token]
        kept = nucleus_tokens
    kept = [token for token in kept if weights[token] >= params.min_p * 2**40 and weights[token]]
    return draw_slowly({token: weights[token] for token in kept}, stream_key(params.seed, params.choice), position)


def draw_slowly(weights: dict[int, int], key: int, position: int) -> int:
    """The class of one bit length by the uniform number, heaviest first; within it the shortest waiting time."""
    at = torch.tensor([key]), torch.tensor([position])
    target = int(uniform(*at).item() * float(sum(weights.values())))
    for bits in sorted({weight.bit_length() for weight in weights.values()}, reverse=True):
        in_class = sorted(token for token, weight in weights.items() if weight.bit_length() == bits)
        target -= sum(weights[token] for token in in_class)
        if target < 0:
            break
    numbers = uniform(stream_key_at(*at).expand(len(in_class)), torch.tensor(in_class))
    times = -torch.log1p(-numbers) / torch.tensor([weights[token] for token in in_class])
    return in_class[int(times.argmin())]


@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(1, 90), st.integers(0, 2**31), st.booleans(), st.data())
@settings(max_examples=250, deadline=None)
def test_equals_the_slow_sampler(
    rows: list[SamplingParams], vocab_size: int, torch_seed: int, has_ties: bool, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(torch_seed)
    logits = torch.randn(len(rows), vocab_size, generator=generator) * 4
    if has_ties:
        logits = logits.round()
    positions = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(rows), max_size=len(rows)))
    expected = [sample_slowly(logits[i].tolist(), rows[i], positions[i]) for i in range(len(rows))]
    assert sample_all(logits, rows, positions) == expected
    assert sample_all(logits, rows, positions, sample_by_loop) == expected


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize(
    ("top_p", "top_k"), [(0.1, 0), (0.9, 0), (0.9999999, 0), (1.0, 50), (0.8, 20), (1.0, 1500), (0.9, 15_000)]
)
def test_looking_at_likely_tokens_only_changes_no_token(
    scale: float, top_p: float, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(6, 20_000, generator=generator) * scale).bfloat16().float()  # bfloat16: many equal logits
    rows = [SamplingParams(1.0, top_p, top_k, 0.0, seed, 0) for seed in range(6)]
    found = sample_all(logits, rows, range(6))
    monkeypatch.setattr(sampler, "_draw_likely", sampler._draw_filtered)
    assert sample_all(logits, rows, range(6)) == found


LIMITS = st.tuples(
    st.floats(0.05, 5.0),
    st.sampled_from([0, 2, 3, 17, 300, 10**6]),
    st.sampled_from([1e-9, 0.2, 0.5, 0.9, 0.99, 0.999999, 1.0]),
    st.sampled_from([0.0, 0.001, 0.1, 1.0]),
)


@given(
    st.lists(LIMITS, min_size=1, max_size=4), st.integers(1, 1200), st.integers(0, 2**31), st.sampled_from([1, 4, 64]),
    st.sampled_from([0.0, 0.3, 2.0, 9.0]), st.sampled_from([None, 0, 2]), st.sampled_from([0.0, 0.5, 0.99]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_likely_tokens_are_those_that_sorting_all_leaves(
    limits: list[tuple[float, int, float, float]], vocab_size: int, torch_seed: int, max_peaks: int,
    scale: float, decimals: int | None, share_banned: float,
) -> None:  # fmt: skip
    """Whatever the temperature, the limits, equal logits, banned tokens, and however few peaks are looked at."""
    generator = torch.Generator().manual_seed(torch_seed)
    logits = torch.randn(len(limits), vocab_size, generator=generator) * scale
    if decimals is not None:
        logits = logits.round(decimals=decimals)
    is_banned = torch.rand(logits.shape, generator=generator) < share_banned
    is_banned[:, torch_seed % vocab_size] = False
    logits = logits.masked_fill(is_banned, -math.inf)
    exponents = logits - logits.amax(1, keepdim=True)
    temperatures, top_ks, top_ps, min_ps = zip(*limits, strict=True)
    of_rows = nucleus.FilterLimits(
        torch.tensor(top_ks), torch.tensor(top_ps, dtype=torch.float64), torch.tensor(min_ps, dtype=torch.float64), True
    )
    unrounded = sampler.unrounded_weights(exponents, torch.tensor(temperatures, dtype=torch.float32))
    expected = nucleus.most_probable(exponents, sampler.fixed_point_weights(unrounded), of_rows)
    totals = sampler.total_weights(unrounded)
    for row, each in enumerate(limits):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(likely_tokens, "MAX_PEAKS", max_peaks)
            found = likely_tokens.kept_tokens(
                exponents[row].numpy(), unrounded[row].numpy(), totals[row], likely_tokens.RowLimits(*each)
            )
        has_weight = found.weights > 0
        left = expected.weights[row] > 0
        assert found.ids[has_weight].tolist() == expected.ids[row][left].tolist()
        assert found.weights[has_weight].tolist() == expected.weights[row][left].tolist()


def test_weights_of_a_flat_row_add_up_to_the_last_unit() -> None:
    unrounded = torch.full((2, 20_000), 2.0**40)
    unrounded[1, 5] = 3.0
    assert sampler.total_weights(unrounded) == [20_000 * 2**40, 19_999 * 2**40 + 3]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=300), INT64S, st.integers(0, 2**31 - 1))
@settings(max_examples=200, deadline=None)
def test_one_row_on_the_host_draws_what_rows_on_a_device_draw(weights: list[int], key: int, position: int) -> None:
    weights = [*weights, 2**40]
    ids = torch.arange(len(weights)) * 7
    places = draw.draw_places(torch.tensor([weights]), ids[None], torch.tensor([key]), torch.tensor([position]))
    kept = likely_tokens.KeptTokens(ids.numpy(), np.array(weights))
    assert draw.draw_kept(kept, key, position) == ids[int(places)]


@pytest.mark.parametrize("seed", [42, 0, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0.9, 1.0, 0), (0.9, 0.9, 0), (0.9, 1.0, 40), (0.0, 1, 0)])
@pytest.mark.parametrize("vocab_size", [1001, 4096])
def test_smp_10_a_row_does_not_depend_on_its_neighbours(
    seed: int, temperature: float, top_p: float, top_k: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(9)
    fixed = torch.randn(vocab_size, generator=generator) * 2
    mine = SamplingParams(temperature, top_p, top_k, 0.0, seed, 0)
    alone = [sample_all(fixed[None], [mine], [position])[0] for position in range(8)]
    for batch_size in (1, 2, 8, 33):
        monkeypatch.setattr(sampler, "_MAX_BLOCK", vocab_size * chance.randint(1, 9))
        for position in range(8):
            logits = torch.randn(batch_size, vocab_size, generator=generator) * 5
            rows = [
                SamplingParams(chance.choice([0, 1.3]), chance.choice([1, 0.8]), chance.choice([0, 9]), 0.0, other, 0)
                for other in range(batch_size)
            ]
            place = chance.randrange(batch_size)
            logits[place], rows[place] = fixed, mine
            at = [position if i == place else chance.randrange(1000) for i in range(batch_size)]
            assert sample_all(logits, rows, at)[place] == alone[position]
    assert temperature == 0 or len(set(alone)) > 1


def test_smp_10_threads_change_no_token() -> None:
    logits = torch.randn(9, 30_011, generator=torch.Generator().manual_seed(2)) * 3
    rows = [SamplingParams(1.0, 0.9 if i % 2 else 1.0, 0, 0.0, i, 0) for i in range(9)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = sample_all(logits, rows, range(9))
        torch.set_num_threads(4)
        assert sample_all(logits, rows, range(9)) == alone
    finally:
        torch.set_num_threads(before)


def test_smp_10_different_seeds_choices_and_positions_differ() -> None:
    logits = torch.zeros(1, 4096)
    base = SamplingParams(1.0, 1.0, 0, 0.0, 0, 0)
    tokens = {sample_all(logits, [base], [0])[0]}
    for other in (SamplingParams(1.0, 1.0, 0, 0.0, 1, 0), SamplingParams(1.0, 1.0, 0, 0.0, 0, 1)):
        tokens.add(sample_all(logits, [other], [0])[0])
    tokens.add(sample_all(logits, [base], [1])[0])
    assert len(tokens) == 4


@pytest.mark.parametrize("pick", SAMPLERS)
@pytest.mark.parametrize("top_p", [1.0, 0.95])
def test_smp_10_rounding_of_logits_hardly_ever_changes_a_token(top_p: float, pick: Sampler) -> None:
    """Errors ten times those between a row alone and in a batch; a draw along the ids changed 78 and 64 of 4,000."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(16, 4096, generator=generator) * 2.5
    rows = [SamplingParams(0.9, top_p, 0, 0.0, seed, 0) for seed in range(16)]
    num_changed = 0
    for position in range(250):
        rounded = logits + torch.randn(logits.shape, generator=generator) * 2e-4
        found = [sample_all(each, rows, [position] * 16, pick) for each in (logits, rounded)]
        num_changed += sum(one != other for one, other in zip(*found, strict=True))
    assert num_changed <= 6


@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
def test_a_race_among_all_and_among_the_few_that_can_win_has_one_winner(scale: float) -> None:
    generator = torch.Generator().manual_seed(4)
    exponents = torch.randn(12, 3001, generator=generator) * scale
    exponents -= exponents.amax(1, keepdim=True)
    weights = sampler.fixed_point_weights(sampler.unrounded_weights(exponents, torch.full((12,), 0.9)))
    classes = draw.weight_classes(weights)
    keys = torch.arange(12) * 77
    heaviest = weights.argsort(dim=1, descending=True)
    for rank in range(20):
        in_class = classes == classes.gather(1, heaviest[:, rank : rank + 1])
        ids = torch.arange(3001).expand_as(weights)
        winners = [race(weights, in_class, ids, keys) for race in (draw.race_among_all, draw.race_among_few)]
        assert torch.equal(*winners)
        assert in_class.gather(1, winners[0]).all()


@pytest.mark.parametrize("weight", [0, 1, 2, 3, 4, 2**20 - 1, 2**20, 2**40 - 1, 2**40])
def test_a_class_is_a_bit_length(weight: int) -> None:
    assert draw.weight_classes(torch.tensor([[weight]])).item() == 41 - weight.bit_length()


@pytest.mark.parametrize("weight", [-(2**63), -1, 0, 2**63 - 1])
def test_what_is_no_weight_has_a_class_and_a_place(weight: int) -> None:
    weights, ids, one = torch.full((1, 5), weight), torch.arange(5)[None], torch.tensor([1])
    assert draw.weight_classes(weights)[0, 0] in range(42)
    assert draw.draw_places(weights, ids, one, one).item() in range(5)


# ---------------------------------------------------------------- the generator


def chi_square_limit(degrees: int) -> float:
    """What chi-square stays under in 9,999 of 10,000 cases (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def numbers(seed: int, choice: int, count: int) -> Tensor:
    return uniform(torch.full((count,), stream_key(seed, choice)), torch.arange(count))


def test_generator_gives_the_published_numbers_of_splitmix64() -> None:
    """Key 1234567 and positions 0 to 4: the first outputs of SplitMix64 with that state."""
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    found = uniform(torch.full((5,), 1234567), torch.arange(5))
    assert found.tolist() == [(word >> 11) / 2**53 for word in published]


@given(INT64S, st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_generator_tensors_equal_python_integers(seed: int, choice: int, position: int) -> None:
    key = stream_key(seed, choice)
    word = (key + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    assert uniform(torch.tensor([key]), torch.tensor([position])).item() == (word >> 11) / 2**53


@given(INT64S, st.integers(0, 2**31 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_generator_on_the_host_gives_the_same_numbers(key: int, position: int, positions: list[int]) -> None:
    at = torch.tensor([key]), torch.tensor([position])
    assert (key_at(key, position), number_at(key, position)) == (stream_key_at(*at).item(), uniform(*at).item())
    all_at = torch.tensor(positions)
    assert numbers_at(key, all_at.numpy()).tolist() == uniform(at[0].expand_as(all_at), all_at).tolist()


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 1234])
def test_generator_is_uniform_and_serially_independent(seed: int) -> None:
    values = numbers(seed, 0, 200_000)
    bins = (values * 256).long()
    assert chi_square(torch.bincount(bins, minlength=256), torch.full((256,), 200_000 / 256)) < chi_square_limit(255)
    pairs = (values[:-1] * 16).long() * 16 + (values[1:] * 16).long()
    assert chi_square(torch.bincount(pairs, minlength=256), torch.full((256,), 199_999 / 256)) < chi_square_limit(255)


def test_generator_streams_of_near_seeds_and_choices_are_independent() -> None:
    keys = torch.tensor([[stream_key(seed, choice) for choice in range(8)] for seed in range(-4000, 4000)])
    values = uniform(keys.flatten(), torch.full((64_000,), 31)).view(8000, 8)
    bins = (values * 64).long().flatten()
    assert chi_square(torch.bincount(bins, minlength=64), torch.full((64,), 1000.0)) < chi_square_limit(63)
    for first, second in ((values[:-1], values[1:]), (values[:, :-1], values[:, 1:])):
        pairs = ((first * 8).long() * 8 + (second * 8).long()).flatten()
        expected = torch.full((64,), len(pairs) / 64)
        assert chi_square(torch.bincount(pairs, minlength=64), expected) < chi_square_limit(63)


@pytest.mark.parametrize("pick", SAMPLERS)
@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [(1.0, 0, 0.0), (0.85, 0, 0.0), (1.0, 12, 0.0), (1.0, 0, 0.1)])
def test_drawn_tokens_follow_the_distribution(top_p: float, top_k: int, min_p: float, pick: Sampler) -> None:
    draws, vocab_size = 20_000, 40
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(0.8, top_p, top_k, min_p, 77, 0)
    tokens = torch.tensor(sample_all(logits.expand(draws, -1), [params] * draws, range(draws), pick))
    probabilities = torch.softmax(logits.double() / 0.8, 0)
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    is_kept = (before < top_p) & (probabilities[order] >= min_p * probabilities.max())
    kept = order[is_kept][: top_k or vocab_size]
    assert set(tokens.tolist()) == set(kept.tolist())
    expected = probabilities[kept] / probabilities[kept].sum() * draws
    assert chi_square(torch.bincount(tokens, minlength=vocab_size)[kept], expected) < chi_square_limit(len(kept) - 1)
