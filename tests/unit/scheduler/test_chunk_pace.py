"""Chunks follow what steps take: at once where they take longer than measured, slowly back, and never beyond."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.chunk_pace import LEAST_COST, ChunkPace, PromptBudget
from services.wire.columns import unpack_int32
from services.wire.steps import StepPlan, StepResult
from tests.unit.scheduler.core_driver import Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit

MEASURED = (600, 300_000.0, 500_000.0)
"""Tokens of the chunk, microseconds that it took, and that one may take, of which six tenths are aimed at."""


def most(pace: ChunkPace, limit: int) -> int:
    """Tokens that fit at the beginning of a prompt, beside decodes."""
    return pace.budget(limit, 8).most_at_beginning


def test_a_pace_that_was_measured_right_stays() -> None:
    pace = ChunkPace(*MEASURED)
    assert (most(pace, 600), most(pace, 1000), most(pace, 200)) == (600, 600, 200)
    for _ in range(5):
        pace.on_step(300_000, 0, 600)
    assert most(pace, 1000) == 600


def test_a_faster_pace_than_measured_pays_for_context_and_never_for_more_tokens() -> None:
    pace = ChunkPace(*MEASURED)
    for _ in range(40):
        pace.on_step(150_000, 0, 600)
    assert (pace.budget(600, 8).tokens, most(pace, 600)) == (600, 600)
    assert 1190 < pace.budget(600, 8).cost <= 1200


def test_longer_steps_count_at_once_and_shorter_ones_slowly() -> None:
    pace = ChunkPace(*MEASURED)
    pace.on_step(600_000, 0, 600)
    assert most(pace, 600) == 400
    pace.on_step(200_000, 0, 400)
    assert most(pace, 600) == 429
    for _ in range(60):
        pace.on_step(most(pace, 600) * 500, 0, most(pace, 600))
    assert 590 < most(pace, 600) <= 600


def test_what_decodes_take_by_themselves_is_not_the_prompts() -> None:
    pace = ChunkPace(*MEASURED)
    pace.on_step(100_000, 20, 0)
    pace.on_step(400_000, 20, 600)
    assert most(pace, 600) == 600
    pace.on_step(350_000, 10, 600)  # half as many: half the time
    assert most(pace, 600) == 600
    pace.on_step(400_000, 10, 600)
    assert 500 < most(pace, 600) < 600


def test_neither_a_small_chunk_nor_a_step_that_stood_still_says_much() -> None:
    pace = ChunkPace(*MEASURED)
    pace.on_step(300_000, 8, LEAST_COST - 1)
    assert most(pace, 600) == 600
    pace.on_step(60_000_000, 0, 600)
    assert most(pace, 600) == 240  # a step four times as long, half of which is believed


def test_a_chunk_never_becomes_smaller_than_is_worth_it() -> None:
    pace, small = ChunkPace(*MEASURED), ChunkPace(80, 300_000.0, 500_000.0)
    for _ in range(10):
        pace.on_step(60_000_000, 0, 600)
        small.on_step(60_000_000, 0, 600)
    assert (most(pace, 600), most(pace, 40)) == (200, 40)
    assert most(small, 80) == LEAST_COST


def test_a_busy_machine_slows_nobodys_prompt_where_nobody_is_being_answered() -> None:
    pace = ChunkPace(*MEASURED)
    for _ in range(10):
        pace.on_step(3_000_000, 0, 600)
    assert pace.budget(600, 0) == PromptBudget(600, 600)
    assert pace.budget(600, 1) == PromptBudget(600, 200)


@pytest.mark.parametrize("fixed_us", [0, 60_000, 150_000])
def test_what_a_step_takes_whatever_its_tokens_does_not_make_chunks_ever_smaller(fixed_us: int) -> None:
    """Steps of 1 ms a token and a fixed part settle where they take what is aimed at, not below."""
    pace = ChunkPace(*MEASURED)
    for _ in range(60):
        cost = most(pace, 600)
        pace.on_step(fixed_us + 1000 * cost, 0, cost)
    assert fixed_us + 1000 * most(pace, 600) == pytest.approx(max(300_000, fixed_us + 200_000), rel=0.02)


@pytest.mark.parametrize(("token_budget", "alone"), [(400, 64), (50, 50)])
def test_a_prompt_alone_takes_twice_the_measured_chunk_as_far_as_a_step_goes(token_budget: int, alone: int) -> None:
    limits = replace(new_limits(100, 16, token_budget=token_budget, chunk_tokens=32), chunk_limit_us=300_000.0)
    assert (limits.prefill_budget(0), limits.prefill_budget(1)) == (alone, min(32, token_budget - 1))
    assert ChunkPace(32, 200_000.0, 300_000.0).budget(limits.prefill_budget(0), 0).most_at_beginning == alone
    assert replace(limits, chunk_limit_us=0.0).prefill_budget(0) == 32


def test_without_a_limit_chunks_are_as_they_are() -> None:
    pace = ChunkPace(600, 300_000.0, 0)
    pace.on_step(60_000_000, 0, 600)
    assert most(pace, 600) == 600


steps = st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 300), st.integers(0, 2**20))


@given(st.tuples(st.integers(0, 8192), st.floats(0, 1e7), st.floats(0, 1e6)), st.lists(steps), st.integers(0, 9000))
def test_whatever_is_seen_a_budget_is_within_its_bounds(
    measured: tuple[int, float, float], seen: list[tuple[int, int, int]], limit: int
) -> None:
    pace = ChunkPace(*measured)
    for step in seen:
        pace.on_step(*step)
        assert min(limit, LEAST_COST) <= most(pace, limit) <= limit


@pytest.mark.parametrize("chunk_context", [0, 500])
def test_a_machine_twice_as_slow_as_measured_is_held_to_the_limit_from_the_second_chunk_on(chunk_context: int) -> None:
    """Beside decodes that take 20 ms, prompt tokens take 1 ms instead of the 0.5 that the chunk of 400 took; 200 ms are
    aimed at.
    """
    limits = new_limits(
        4000, 1, max_rows=8, token_budget=408, chunk_tokens=400, chunk_context=chunk_context, plans_ahead=0,
        chunk_us=200_000, chunk_limit_us=333_334,
    )  # fmt: skip
    driver = Driver(limits)

    def duration_us(plan: StepPlan) -> int:
        starts, counts = unpack_int32(plan.start_positions), unpack_int32(plan.num_new_tokens)
        chunks = [(start, count) for start, count in zip(starts, counts, strict=True) if count > 1]
        dearer = (count * (1 + (start / chunk_context if chunk_context else 0)) for start, count in chunks)
        return 20_000 + int(1000 * sum(dearer))

    def step() -> tuple[int, int]:
        """One step: what it took, and how many prompt tokens it had."""
        plan = driver.core.plan_step()
        assert plan is not None
        driver.worker.run(plan)
        took_us = duration_us(plan)
        result: StepResult = replace(driver.worker.deliver(), step_us=took_us)
        for item in driver.core.apply_result(result):
            driver.record(item)
        driver.core.check_invariants()
        return took_us, max(unpack_int32(plan.num_new_tokens))

    decoding = driver.submit(new_submit(1, [1] * 20, 200))
    for _ in range(3):
        step()
    long = driver.submit(new_submit(2, [2] * 2000, 2))
    first_us, first_tokens = step()
    assert (first_us, first_tokens) == (419_000, 399)  # with the decode whole tiles of 16
    seen = [(first_us, first_tokens)]
    while not long.token_ids:
        seen.append(step())
    *chunks, _last = seen
    assert all((tokens + 1) % 16 == 0 for _, tokens in chunks if tokens >= LEAST_COST)
    assert sum(tokens for _, tokens in seen) == 2000
    assert (
        max(took_us for took_us, _ in chunks[2:]) < 260_000
    )  # the limit beside the decodes, and what is not yet learned
    assert max(took_us for took_us, _ in chunks[6:]) < 223_000
    driver.run()
    for answer in (decoding, long):
        driver.check_answer(answer)
