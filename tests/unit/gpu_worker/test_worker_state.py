"""Rows held by requests: plans become step inputs, and plans that do not fit are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.held_rows import WorkerSizes
from services.gpu_worker.plan_check import PlanError
from services.gpu_worker.sampler import SampledTokens
from services.gpu_worker.step_inputs import StepInputs, StepRow, build_step_inputs
from services.gpu_worker.step_work import StepOutput
from services.gpu_worker.worker_state import WorkerState
from services.wire.columns import pack_int32
from services.wire.finish import Finish
from services.wire.steps import StepPlan
from tests.unit.gpu_worker.plan_writer import PlanWriter, Request

CPU = torch.device("cpu")
SIZES = WorkerSizes(max_rows=4, max_model_len=64, vocab_size=100, page_size=4, num_pages=40)


def new_state() -> tuple[WorkerState, PlanWriter]:
    return WorkerState(SIZES, CPU), PlanWriter(SIZES.page_size, SIZES.num_pages, SIZES.max_rows)


def pretend_to_sample(state: WorkerState, plan: StepPlan, token_ids: list[int]) -> StepInputs:
    step = state.prepare(plan)
    assert step is not None
    work = state.options.work(state.pick(step), step.spans, None)
    state.keep(work, StepOutput(SampledTokens(torch.tensor(token_ids), torch.zeros(len(token_ids), dtype=torch.bool))))
    return step.inputs


def assert_same_inputs(found: StepInputs, expected: StepInputs) -> None:
    for name in ("input_ids", "positions", "slot_mapping"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.query_lengths == expected.query_lengths
    assert found.context_lengths == expected.context_lengths
    for row, length in enumerate(expected.context_lengths):
        num_pages = -(-length // SIZES.page_size)
        assert torch.equal(found.page_table[row, :num_pages], expected.page_table[row, :num_pages])
    ends = torch.tensor(expected.query_lengths).cumsum(0) - 1
    assert torch.equal(found.sample_indices, ends)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_any_course_of_plans_is_laid_out_as_the_plain_builder_does(seed: int, most_new: int, num_steps: int) -> None:
    """Requests come, are prefilled in pieces, decode, leave, and come back with their outputs."""
    chance = random.Random(seed)
    state, writer = new_state()
    running: list[Request] = []
    gone: list[Request] = []
    for _ in range(num_steps):
        leaving = [r for r in running if r.row >= 0 and (chance.random() < 0.1 or len(r.token_ids) > 30)]
        for request in leaving:
            writer.release(request)
            running.remove(request)
            if len(request.token_ids) <= 30:
                gone.append(request)
        while len(running) < SIZES.max_rows and chance.random() < 0.5:
            if gone and chance.random() < 0.5:
                running.append(gone.pop())
            else:
                prompt = [chance.randrange(100) for _ in range(chance.randint(1, 14))]
                running.append(Request(chance.getrandbits(100), prompt))
        chosen = [request for request in running if chance.random() < 0.7]
        chance.shuffle(chosen)
        if not chosen:
            continue
        rows, parts = [], []
        for request in chosen:
            num_known = len(request.token_ids)
            count = min(chance.randint(1, most_new), num_known - request.num_planned)
            parts.append((request, count))
        starts = [request.num_planned for request in chosen]
        plan = writer.plan(*parts)
        for (request, count), start in zip(parts, starts, strict=True):
            rows.append(StepRow(request.token_ids[start : start + count], start, request.pages, True))
        tokens = [chance.randrange(100) for _ in chosen]
        found = pretend_to_sample(state, plan, tokens)
        assert_same_inputs(found, build_step_inputs(rows, SIZES.page_size, CPU))
        for request, token, samples in zip(chosen, tokens, plan.samples, strict=True):
            if samples:
                request.output.append(token)


def test_a_token_that_only_the_device_knows_is_the_next_input() -> None:
    state, writer = new_state()
    one, two = Request(1, [5, 6, 7]), Request(2, [8])
    pretend_to_sample(state, writer.plan((one, 3), (two, 1)), [11, 22])
    later = pretend_to_sample(state, writer.plan((two, 1), (one, 1)), [33, 44])
    assert later.input_ids.tolist() == [22, 11]
    assert pretend_to_sample(state, writer.plan((one, 1)), [0]).input_ids.tolist() == [44]


def test_a_resumed_request_continues_its_output_indexes() -> None:
    state, writer = new_state()
    step = state.prepare(writer.plan((Request(1, [5, 6, 7], output=[9, 9], attempt=3), 5)))
    assert step is not None
    assert step.rows.first_indexes.tolist() == [2]
    assert step.rows.attempts == [3]


def test_a_row_is_used_again_in_the_plan_that_releases_it() -> None:
    state, writer = new_state()
    one = Request(1, [5] * 9)
    pretend_to_sample(state, writer.plan((one, 9)), [1])
    writer.release(one)
    two = Request(2, [6, 7])
    inputs = pretend_to_sample(state, writer.plan((two, 2)), [1])
    assert inputs.input_ids.tolist() == [6, 7]
    assert inputs.positions.tolist() == [0, 1]
    assert state.num_held == 1


def test_a_plan_that_runs_nothing_only_changes_rows() -> None:
    state, writer = new_state()
    one = Request(1, [5])
    pretend_to_sample(state, writer.plan((one, 1)), [1])
    writer.release(one)
    assert state.prepare(writer.plan()) is None
    assert state.num_held == 0


def test_a_cached_prefix_is_not_computed_again() -> None:
    state, writer = new_state()
    request = Request(1, list(range(10)))
    pages = [writer.free_pages.pop(), writer.free_pages.pop()]
    writer.start_with_prefix(request, pages)
    inputs = pretend_to_sample(state, writer.plan((request, 2)), [1])
    assert inputs.input_ids.tolist() == [8, 9]
    assert inputs.context_lengths == (10,)
    assert inputs.page_table[0, :2].tolist() == pages


@pytest.mark.parametrize("token_id", [100, 2**31 - 1])
def test_tok_04_ids_outside_the_vocabulary_fail_their_own_row_and_never_reach_the_model(token_id: int) -> None:
    state, writer = new_state()
    step = state.prepare(writer.plan((Request(1, [5, token_id]), 2), (Request(2, [99]), 1)))
    assert step is not None
    assert step.rows.is_refused == [True, False]
    assert step.inputs.input_ids.tolist() == [0, 0, 99]


def test_a_failed_row_s_pages_are_cleared_when_it_is_released() -> None:
    state, writer = new_state()
    one, two = Request(1, [5] * 12), Request(2, [6] * 12)
    step = state.prepare(writer.plan((one, 6), (two, 6)))
    assert step is not None
    later = state.prepare(writer.plan((one, 6), (two, 6)))
    assert later is not None
    state.note_failures(later.rows, [Finish.NUMERICAL_ERROR, Finish.NONE])
    spoiled = one.pages[1:]
    writer.release(one)
    writer.release(two)
    cleared = state.prepare(writer.plan((Request(3, [1]), 1)))
    assert cleared is not None
    assert cleared.pages_to_clear == spoiled


def test_a_failure_of_a_row_that_was_released_meanwhile_spoils_nobody_s_pages() -> None:
    state, writer = new_state()
    one = Request(1, [5] * 6)
    step = state.prepare(writer.plan((one, 6)))
    assert step is not None
    writer.release(one)
    two = Request(2, [6])
    assert state.prepare(writer.plan((two, 1))) is not None
    state.note_failures(step.rows, [Finish.NUMERICAL_ERROR])
    writer.release(two)
    later = state.prepare(writer.plan((Request(3, [7]), 1)))
    assert later is not None
    assert later.pages_to_clear == []


BROKEN: dict[str, Callable[[StepPlan], StepPlan]] = {
    "released, but nobody holds it": lambda plan: replace(plan, released_rows=pack_int32([3])),
    "is not free": lambda plan: replace(plan, new_rows=(replace(plan.new_rows[0], row=0),)),
    "row 4 of 4": lambda plan: replace(plan, new_rows=(replace(plan.new_rows[0], row=4),)),
    "prompt tokens of": lambda plan: replace(plan, new_rows=(replace(plan.new_rows[0], num_prompt_tokens=9),)),
    "0 prompt tokens of 0": lambda plan: replace(
        plan, new_rows=(replace(plan.new_rows[0], token_ids=b"", num_prompt_tokens=0),)
    ),
    "page outside": lambda plan: replace(plan, new_rows=(replace(plan.new_rows[0], page_ids=pack_int32([40])),)),
    "gets 17 pages": lambda plan: replace(plan, new_rows=(replace(plan.new_rows[0], page_ids=pack_int32(range(17))),)),
    "gets pages, but nobody": lambda plan: replace(
        plan, page_rows=pack_int32([2]), page_counts=pack_int32([1]), page_ids=pack_int32([0])
    ),
    "twice in one step": lambda plan: replace(plan, rows=pack_int32([0, 0])),
    "runs, but nobody holds it": lambda plan: replace(plan, rows=pack_int32([0, 3])),
    "computes nothing": lambda plan: replace(plan, num_new_tokens=pack_int32([0, 2])),
    "does not start where": lambda plan: replace(plan, start_positions=pack_int32([2, 0])),
    "tokens that it does not have": lambda plan: replace(plan, num_new_tokens=pack_int32([2, 2])),
    "too few pages": lambda plan: replace(plan, new_rows=(replace(plan.new_rows[0], page_ids=b""),)),
    "before its last token": lambda plan: replace(plan, num_new_tokens=pack_int32([1, 1])),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_plan_that_does_not_fit_is_refused_and_says_why(problem: str) -> None:
    state, writer = new_state()
    one = Request(1, [5, 6, 7])
    pretend_to_sample(state, writer.plan((one, 3)), [1])
    plan = BROKEN[problem](writer.plan((one, 1), (Request(2, [8, 9]), 2)))
    with pytest.raises(PlanError, match=problem):
        state.prepare(plan)


def test_ids_that_are_neither_on_the_host_nor_the_last_on_the_device_are_refused() -> None:
    state, writer = new_state()
    one = Request(1, [5, 6, 7])
    state.prepare(writer.plan((one, 2)))
    for _ in range(2):
        pretend_to_sample(state, writer.plan((one, 1)), [8])
    broken = replace(writer.plan((one, 1)), start_positions=pack_int32([4]), num_new_tokens=pack_int32([2]))
    with pytest.raises(PlanError):
        state.prepare(broken)
