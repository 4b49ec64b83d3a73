"""The bench of routing: what it sends shares what it says, and its ratios are those of its runs."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.routing import ONE, PREFIX, ROUND_ROBIN, Run, Workload, parse_arguments, tables


def test_each_prefix_comes_as_often_and_no_two_prompts_are_alike() -> None:
    workload = Workload(num_prefixes=5, per_prefix=3, prefix_tokens=64, own_tokens=8, output_tokens=4, concurrency=2)
    prompts = workload.prompts()
    assert Counter(Counter(tuple(prompt[:64]) for prompt in prompts).values()) == {3: 5}
    assert len({tuple(prompt) for prompt in prompts}) == 15
    assert {len(prompt) for prompt in prompts} == {72}
    assert prompts == workload.prompts()


def test_the_ratios_are_of_pairs_that_ran_one_after_the_other() -> None:
    runs = [
        Run(name, hit_rate, tokens_per_s, first_token_ms=1.0, seconds=1.0, failures=[])
        for name, hit_rate, tokens_per_s in (
            (ONE, 0.8, 100.0), (PREFIX, 0.76, 300.0), (ROUND_ROBIN, 0.5, 200.0), (PREFIX, 0.76, 120.0),
            (ROUND_ROBIN, 0.5, 100.0),
        )
    ]  # fmt: skip
    text = tables(runs)
    assert "hit rate by prefix / of one worker: 0.950" in text
    assert "median of 2 pairs: 1.35" in text


@pytest.mark.parametrize("arguments", [["--workers", "1"], ["--prefix-tokens", "16"], ["--rounds", "0"]])
def test_what_measures_nothing_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
