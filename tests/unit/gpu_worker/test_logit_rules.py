"""Rules on logits: the cases of the failure bank, and the tables against the obvious way."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.gpu_worker.added_logits import BAN
from services.gpu_worker.bit_masks import num_words, pack_ids, take_from_others
from services.gpu_worker.logit_rules import LogitRulesTable
from services.gpu_worker.row_lines import Picks
from services.gpu_worker.sampler import sample
from services.gpu_worker.sampling_table import SamplingTable
from services.wire.request_params import LogitRules, SamplingParams
from tests.unit.gpu_worker.rule_reference import ruled, rules

CPU = torch.device("cpu")
UNIT = [2.0, 1.0, -1.0, 0.5]


def picks(rows: list[int], num_outputs: list[int], num_prompt: int = 0) -> Picks:
    at = np.arange(len(rows), dtype=np.int64)
    outputs = np.array(num_outputs, dtype=np.int64)
    return Picks(at, at, np.array(rows, dtype=np.int64), outputs + num_prompt, outputs)


def apply(wanted: LogitRules, prompt: list[int], output: list[int], logits: list[float]) -> list[float]:
    """One row; what is banned is -inf."""
    table = LogitRulesTable(1, len(logits), CPU)
    table.set_row(0, wanted, np.array(prompt + output, dtype=np.int64), len(prompt))
    changed = torch.tensor([logits])
    found = table.among(picks([0], [len(output)]))
    assert found is not None
    table.apply(changed, found)
    return without_banned(changed)[0]


def without_banned(logits: Tensor) -> list[list[float]]:
    rows: list[list[float]] = torch.where(logits < -BAN / 2, -math.inf, logits).tolist()
    return rows


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (rules(frequency=0.5, presence=0.25), [0.75, 1, -1.75, 0.5]),
        (rules(repetition=2), [1, 0.5, -2, 0.5]),
        (rules(frequency=0.5, presence=0.25, repetition=2), [-0.25, 0.5, -2.75, 0.5]),
    ],
)
def test_smp_12_which_tokens_the_penalties_count(wanted: LogitRules, expected: list[float]) -> None:
    assert apply(wanted, [1], [0, 0, 2], UNIT) == expected
    assert ruled(UNIT, wanted, [1], [0, 0, 2]) == expected


def test_smp_12_greedy_decoding_is_affected_too() -> None:
    table, sampling = LogitRulesTable(1, 4, CPU), SamplingTable(1, CPU)
    table.set_row(0, rules(frequency=0.5, presence=0.75), np.array([1, 0, 0, 2]), 1)
    sampling.set_rows([0], [SamplingParams(0.0, 1.0, 0, 0.0, 0, 0)])
    logits = torch.tensor([UNIT])
    at = picks([0], [3], 1)
    assert sample(logits, sampling.groups(at.rows, at.positions)).token_ids.tolist() == [0]
    found = table.among(at)
    assert found is not None
    table.apply(logits, found)
    assert sample(logits, sampling.groups(at.rows, at.positions)).token_ids.tolist() == [1]


@pytest.mark.parametrize("repetition", [5e-324, 1.4e-45, 1e-6, 1e-3])
@pytest.mark.parametrize("largest", [500.0, 1e-30])
def test_smp_12_the_least_penalty_leaves_numbers_and_stays_below_a_ban(repetition: float, largest: float) -> None:
    wanted = rules(repetition=repetition, frequency=-2, presence=-2, stops=[0], min_tokens=9)
    changed = apply(wanted, [0, 1], [0, 2], [largest, largest, -largest, 0.0])
    assert changed[0] == -math.inf  # held open: no penalty brings it back
    assert all(math.isfinite(value) for value in changed[1:])
    assert changed[1] >= largest


def test_smp_03_ids_that_the_model_does_not_have_change_nothing() -> None:
    """The tokenizer answers 400; should one come nevertheless, no row and no process is harmed."""
    wanted = rules(
        biases={4: 5.0, 10**6: 5.0}, stops=[9], min_tokens=3, bad_words=[[9], [9, 1], []], allowed=[0, 1, 99]
    )
    assert apply(wanted, [1], [], UNIT) == [2.0, 1.0, -math.inf, -math.inf]


def test_smp_03_a_bias_counts_for_greedy_rows() -> None:
    assert apply(rules(biases={0: -100.0, 3: 1.5}), [1], [], UNIT) == [-98.0, 1.0, -1.0, 2.0]
    twice = LogitRules(bias_ids=b"\1\0\0\0" * 2, biases=b"\0\0\0\x3f" * 2)
    assert apply(twice, [1], [], UNIT) == [2.0, 2.0, -1.0, 0.5]


def test_min_tokens_forbids_the_stop_ids_until_there_are_as_many() -> None:
    wanted = rules(min_tokens=2, stops=[0, 3, 0])
    assert apply(wanted, [0, 0], [], UNIT) == [-math.inf, 1.0, -1.0, -math.inf]
    assert apply(wanted, [0, 0], [1], UNIT) == [-math.inf, 1.0, -1.0, -math.inf]
    assert apply(wanted, [0, 0], [1, 1], UNIT) == UNIT


def test_bad_words_are_forbidden_where_they_would_be_complete() -> None:
    wanted = rules(bad_words=[[1, 2, 3], [2, 0], [1]])
    assert apply(wanted, [1, 2], [], UNIT) == [2.0, -math.inf, -1.0, 0.5]  # a word does not begin in the prompt
    assert apply(wanted, [0], [1, 2], UNIT) == [-math.inf, -math.inf, -1.0, -math.inf]
    assert apply(wanted, [0], [2, 1], UNIT) == [2.0, -math.inf, -1.0, 0.5]


def test_where_all_is_forbidden_the_least_forbidden_wins_and_no_row_fails() -> None:
    wanted = rules(allowed=[1, 2], bad_words=[[1], [2]], min_tokens=1, stops=[2])
    table = LogitRulesTable(1, 4, CPU)
    table.set_row(0, wanted, np.array([0]), 1)
    logits = torch.tensor([UNIT])
    found = table.among(picks([0], [0]))
    assert found is not None
    table.apply(logits, found)
    tokens = sample(logits, [])
    assert tokens.token_ids.tolist() == [1]
    assert not tokens.is_failed.any()


def test_nan_logits_stay_what_they_are() -> None:
    changed = apply(rules(repetition=2, frequency=1, biases={0: 1}), [0], [1], [math.nan, math.nan, math.inf, 1.0])
    assert math.isnan(changed[0])
    assert math.isnan(changed[1])
    assert changed[2:] == [math.inf, 1.0]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 700])
def test_bit_masks_take_from_all_other_ids(vocab_size: int) -> None:
    chance = random.Random(vocab_size)
    sets = [[i for i in range(vocab_size) if chance.random() < 0.4] for _ in range(3)]
    logits = torch.randn(5, vocab_size)
    expected = logits.clone()
    rows = [4, 0, 2]
    for row, ids in zip(rows, sets, strict=True):
        for token_id in range(vocab_size):
            if token_id not in ids:
                expected[row, token_id] = -math.inf
    packed = torch.from_numpy(np.stack([pack_ids(np.array(ids, dtype=np.int64), vocab_size) for ids in sets]))
    assert packed.shape == (3, num_words(vocab_size))
    take_from_others(logits, torch.tensor(rows), packed, math.inf)
    assert torch.equal(logits, expected)


def test_rows_without_rules_pay_nothing() -> None:
    table = LogitRulesTable(4, 100, CPU)
    assert table.among(picks([0, 1, 2, 3], [0] * 4)) is None
    table.set_row(2, rules(repetition=1.5), np.array([1, 2]), 1)
    assert table.among(picks([0, 1, 3], [0] * 3)) is None
    found = table.among(picks([0, 2], [0, 1]))
    assert found is not None
    assert (found.biased, found.held_open, found.with_bad_words, found.restricted) == (None,) * 4
    assert found.penalized is not None
    assert found.penalized.at.logit_rows.tolist() == [1]
    table.set_row(2, None, np.array([1]), 1)
    assert table.among(picks([2], [0])) is None


# ---------------------------------------------------------------- any course against the obvious way

VOCAB_SIZE = 23
_IDS = st.integers(0, VOCAB_SIZE - 1)
_PENALTIES = st.sampled_from([0.0, 0.0, 0.5, -0.7, 1.3])
_RULES = st.builds(
    rules,
    frequency=_PENALTIES,
    presence=_PENALTIES,
    repetition=st.sampled_from([1.0, 1.0, 1.3, 0.5, 2.0]),
    min_tokens=st.integers(0, 4),
    stops=st.lists(_IDS, max_size=3),
    biases=st.dictionaries(_IDS, st.sampled_from([-100.0, -1.5, 0.25, 7.0]), max_size=4),
    allowed=st.lists(_IDS, max_size=12),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
)


@given(st.lists(st.one_of(st.none(), _RULES), min_size=1, max_size=5), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_rules_in_any_course_of_steps_equal_the_obvious_way(all_rules: list[LogitRules | None], seed: int) -> None:
    """Rows come, pick in some steps, get ids without picking, and leave for other requests."""
    chance = random.Random(seed)
    table = LogitRulesTable(4, VOCAB_SIZE, CPU)
    held: dict[int, tuple[LogitRules | None, list[int], list[int]]] = {}
    for step in range(12):
        for row in range(4):
            if row not in held or chance.random() < 0.15:
                prompt = [chance.randrange(4) for _ in range(chance.randint(1, 5))]
                output = [chance.randrange(4) for _ in range(chance.choice([0, 0, 3]))]
                held[row] = (chance.choice(all_rules), prompt, output)
                table.set_row(row, held[row][0], np.array(prompt + output, dtype=np.int64), len(prompt))
            elif chance.random() < 0.1:
                forced = [chance.randrange(4) for _ in range(chance.randint(1, 3))]
                held[row][2].extend(forced)
                table.append(row, np.array(forced, dtype=np.int64))
        rows = chance.sample(range(4), chance.randint(1, 4))
        logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed + step)) * 3
        expected = [
            logits[place].tolist() if held[row][0] is None else ruled(logits[place].tolist(), *held[row])  # type: ignore[arg-type]
            for place, row in enumerate(rows)
        ]
        found = table.among(picks(rows, [len(held[row][2]) for row in rows]))
        for place, row in enumerate(rows):
            one = logits[place : place + 1].clone()
            alone = table.among(picks([row], [len(held[row][2])]))
            if alone is not None:
                table.apply(one, alone)
            assert without_banned(one)[0] == expected[place]
        if found is not None:
            table.apply(logits, found)
        assert without_banned(logits) == expected
        token_ids = torch.tensor([chance.randrange(4) for _ in rows])
        if found is not None:
            table.keep(found, token_ids)
        for place, row in enumerate(rows):
            held[row][2].append(int(token_ids[place]))
