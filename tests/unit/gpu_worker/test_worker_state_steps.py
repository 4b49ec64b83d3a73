"""Plans run on a tiny random model: whatever the course of plans, a request gets the tokens that it gets alone."""

from __future__ import annotations

import random

import pytest
import torch

from services.gpu_worker.step_inputs import StepInputs
from services.gpu_worker.weights import LoadedModel
from services.wire.finish import Finish
from services.wire.request_params import SamplingParams
from services.wire.steps import StepPlan
from tests.unit.gpu_worker.plan_writer import GREEDY, Request
from tests.unit.gpu_worker.step_bench import NUM_OUTPUTS, new_bench
from tests.unit.gpu_worker.worker_peer import SHAPE

pytestmark = pytest.mark.usefixtures("one_thread")

WARM = SamplingParams(1.3, 0.95, 0, 0.0, 42, 0)


def new_requests(count: int = 5) -> list[Request]:
    """Prompts of several lengths; greedy and drawing ones."""
    chance = random.Random(3)
    return [
        Request(
            number,
            [chance.randrange(SHAPE.vocab_size) for _ in range(chance.randint(1, 17))],
            GREEDY if number % 2 else SamplingParams(1.2, 0.9 if number % 4 else 1.0, 0, 0.0, number, number),
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> list[list[int]]:
    """The outputs of `new_requests`, each run alone with its whole prompt in one step."""
    outputs = []
    for request in new_requests():
        new_bench(model).finish_all([request])
        outputs.append(request.output)
    return outputs


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_sch_13_all_at_once_gives_what_each_gives_alone(
    model: LoadedModel, alone: list[list[int]], page_size: int
) -> None:
    requests = new_requests()
    new_bench(model, page_size).finish_all(requests)
    assert [request.output for request in requests] == alone
    assert all(len(output) == NUM_OUTPUTS for output in alone)
    assert len({tuple(output) for output in alone}) == len(alone)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("plans_ahead", [0, 1, 4])
def test_any_course_of_chunks_decodes_and_retractions_gives_the_same_tokens(
    model: LoadedModel, alone: list[list[int]], seed: int, plans_ahead: int
) -> None:
    """Plans go out before the results of earlier ones are read; some requests are retracted and resume."""
    requests = new_requests()
    new_bench(model).run_any_course(requests, seed, plans_ahead)
    assert [request.output for request in requests] == alone


def test_smp_10_seeded_request_alone_among_others_and_after_retraction(model: LoadedModel) -> None:
    outputs = []
    for others in (0, 5):
        request = Request(99, [3, 1, 4, 1, 5], WARM)
        neighbours = [Request(n, [n] * 9, SamplingParams(1.0, 1.0, 0, 0.0, n, 0)) for n in range(others)]
        new_bench(model).finish_all([*neighbours, request])
        outputs.append(request.output)
    bench, request = new_bench(model), Request(99, [3, 1, 4, 1, 5], WARM)
    bench.finish_all([request], 3)
    bench.writer.release(request)
    request.num_expected = 0
    bench.finish_all([request])
    outputs.append(request.output)
    assert outputs[0] == outputs[1] == outputs[2]
    other_seed = Request(1, [3, 1, 4, 1, 5], SamplingParams(1.3, 0.95, 0, 0.0, 0, 0))
    new_bench(model).finish_all([other_seed])
    assert other_seed.output != outputs[0]


def test_a_cached_prefix_gives_the_same_tokens(model: LoadedModel) -> None:
    bench = new_bench(model)
    first = Request(1, list(range(20, 33)))
    bench.finish_all([first])
    second = Request(2, first.prompt)
    bench.writer.start_with_prefix(second, first.pages[:3])
    bench.finish_all([second])
    assert second.output == first.output


# ---------------------------------------------------------------- failures


def test_smp_02_a_poisoned_page_fails_its_row_alone_and_is_clean_for_the_next(
    model: LoadedModel, alone: list[list[int]]
) -> None:
    bench, requests = new_bench(model), new_requests()
    victim = requests[2]
    bench.finish_all(requests, 3)
    bench.kv_cache.keys[:, victim.pages[0]] = float("nan")
    bench.finish_all(requests)
    assert victim.finish == Finish.NUMERICAL_ERROR
    assert victim.output == alone[2][:3]
    assert [r.output for r in requests if r is not victim] == [o for n, o in enumerate(alone) if n != 2]
    written = victim.pages[(victim.num_planned - 1) // 4 :]
    assert torch.isnan(bench.kv_cache.values[:, written]).any()
    bench.writer.release(victim)
    bench.run((Request(50, [1, 2]), 2))
    assert not torch.isnan(bench.kv_cache.values[:, written]).any()


def test_smp_02_a_prompt_is_seen_to_fail_before_its_last_chunk(model: LoadedModel) -> None:
    bench = new_bench(model)
    victim, other = Request(1, [5] * 12), Request(2, [6] * 12)
    bench.run((victim, 4), (other, 4))
    bench.kv_cache.values[:, victim.pages[0]] = float("nan")
    bench.run((victim, 4), (other, 4))
    assert victim.finish == Finish.NUMERICAL_ERROR
    assert not other.finish
    assert victim.output == other.output == []


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_smp_02_logits_of_one_row(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, poison: float, sampling: SamplingParams
) -> None:
    expected = [Request(n, [n, 7], sampling) for n in range(3)]
    new_bench(model).finish_all(expected)
    bench, requests = new_bench(model), [Request(n, [n, 7], sampling) for n in range(3)]
    compute = bench.runner.logits

    def poisoned(normed: torch.Tensor) -> torch.Tensor:
        logits = compute(normed)
        logits[1, : None if poison != poison else 1] = poison
        return logits

    monkeypatch.setattr(bench.runner, "logits", poisoned)
    bench.run(*((request, 2) for request in requests))
    monkeypatch.undo()
    bench.finish_all(requests)
    assert [request.finish for request in requests] == [Finish.NONE, Finish.NUMERICAL_ERROR, Finish.NONE]
    assert [r.output for r in requests] == [expected[0].output, [], expected[2].output]


def test_tok_04_an_unknown_id_fails_its_own_request(model: LoadedModel, alone: list[list[int]]) -> None:
    bench, requests = new_bench(model), new_requests(3)
    bad = Request(77, [1, SHAPE.vocab_size])
    bench.finish_all([*requests, bad])
    assert bad.finish == Finish.INTERNAL_ERROR
    assert [request.output for request in requests] == alone[:3]


@pytest.mark.parametrize("error", [RuntimeError("kernel"), torch.OutOfMemoryError("full"), MemoryError()])
def test_prc_05_a_row_that_raises_fails_alone(
    model: LoadedModel, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever step it is in, the rows beside it get their tokens, greedy and drawn."""
    bench, requests = new_bench(model), new_requests()
    bad = Request(66, [111, 111, 3])
    hidden = bench.runner.hidden

    def broken(inputs: StepInputs) -> torch.Tensor:
        if [111, 111, 3] in [inputs.input_ids[start : start + 3].tolist() for start in inputs.query_starts]:
            raise error
        return hidden(inputs)

    monkeypatch.setattr(bench.runner, "hidden", broken)
    bench.run((requests[0], len(requests[0].prompt)))
    bench.run(*((request, len(request.prompt)) for request in requests[1:]), (bad, 3), (requests[0], 1))
    assert bad.finish == Finish.INTERNAL_ERROR
    bench.writer.release(bad)
    monkeypatch.undo()
    bench.finish_all(requests)
    assert [request.output for request in requests] == alone


def test_prc_05_a_step_that_always_raises_fails_all_its_rows_and_no_others(
    model: LoadedModel, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, requests = new_bench(model), new_requests()
    bench.finish_all(requests[:2], 3)

    def broken(inputs: StepInputs) -> torch.Tensor:
        raise RuntimeError("kernel")

    monkeypatch.setattr(bench.runner, "hidden", broken)
    bench.run((requests[2], 2), (requests[3], 1))
    monkeypatch.undo()
    assert [request.finish for request in requests] == [0, 0, Finish.INTERNAL_ERROR, Finish.INTERNAL_ERROR, 0]
    for failed in requests[2:4]:
        bench.writer.release(failed)
    bench.finish_all([requests[0], requests[1], requests[4]])
    assert [requests[n].output for n in (0, 1, 4)] == [alone[n] for n in (0, 1, 4)]


def test_a_plan_ahead_of_a_failed_row_still_runs(model: LoadedModel, alone: list[list[int]]) -> None:
    """The row is in two more plans before the scheduler hears that it failed; its neighbour notices nothing."""
    bench, requests = new_bench(model), new_requests(2)
    for request in requests:
        bench.run((request, len(request.prompt)))
    bench.kv_cache.keys[:, requests[0].pages[0]] = float("nan")
    plans: list[StepPlan] = [bench.writer.plan(*((request, 1) for request in requests)) for _ in range(3)]
    for pending in [bench.launcher.launch(plan) for plan in plans]:
        bench.take(pending)
    assert requests[0].finish == Finish.NUMERICAL_ERROR
    assert bench.launcher._state.num_failed_rows == 1
    assert requests[1].output == alone[1][:4]


def test_a_plan_that_only_releases_is_answered(model: LoadedModel) -> None:
    bench, request = new_bench(model), Request(1, [5])
    bench.run((request, 1))
    bench.writer.release(request)
    result = bench.launcher.finish(bench.launcher.launch(bench.writer.plan()))
    assert (result.rows, result.step) == (b"", 1)
