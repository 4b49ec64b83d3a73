"""Proposals in running steps: whatever is proposed, a request gets the tokens that it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.gpu_worker.plan_check import PlanError
from services.gpu_worker.proposals import followers
from services.gpu_worker.weights import LoadedModel
from services.wire.columns import pack_int32
from services.wire.request_params import LogitRules, SamplingParams
from tests.unit.gpu_worker.plan_writer import GREEDY, Request
from tests.unit.gpu_worker.step_bench import NUM_OUTPUTS, Bench, new_bench
from tests.unit.gpu_worker.worker_peer import SHAPE

pytestmark = pytest.mark.usefixtures("one_thread")


def new_requests() -> list[Request]:
    """Greedy ones, some that draw from all and some that filter; one that draws without a seed of the client's."""
    chance = random.Random(8)
    ways = [
        GREEDY,
        SamplingParams(1.2, 1.0, 0, 0.0, 5, 0),
        SamplingParams(0.9, 0.9, 0, 0.0, 6, 1),
        SamplingParams(1.1, 1.0, 20, 0.05, -(2**40) + 3, 0),
        GREEDY,
    ]
    return [
        Request(number, [chance.randrange(SHAPE.vocab_size) for _ in range(chance.randint(2, 17))], sampling)
        for number, sampling in enumerate(ways)
    ]


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> list[list[int]]:
    """What each gives alone, one token a step, and more than is asked of it below."""
    requests = new_requests()
    for request in requests:
        new_bench(model).finish_all([request], 2 * NUM_OUTPUTS)
    return [request.output for request in requests]


def started(model: LoadedModel, request: Request, page_size: int = 4) -> Bench:
    """The request has its first token."""
    bench = new_bench(model, page_size)
    bench.run((request, len(request.prompt)))
    return bench


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("number", range(5))
def test_proposals_that_are_right_all_stand(
    model: LoadedModel, alone: list[list[int]], number: int, page_size: int
) -> None:
    request = new_requests()[number]
    bench = started(model, request, page_size)
    assert bench.verify(request, alone[number][1:7]) == 7
    assert bench.verify(request, alone[number][8:10]) == 3
    bench.finish_all([request], 2 * NUM_OUTPUTS)
    assert request.output == alone[number]


@pytest.mark.parametrize("num_right", range(5))
@pytest.mark.parametrize("number", range(3))
def test_what_follows_a_wrong_proposal_is_forgotten(
    model: LoadedModel, alone: list[list[int]], number: int, num_right: int
) -> None:
    request, expected = new_requests()[number], alone[number]
    proposal = expected[1:6]
    proposal[num_right] = (proposal[num_right] + 1) % SHAPE.vocab_size
    bench = started(model, request)
    assert bench.verify(request, proposal) == num_right + 1
    bench.finish_all([request], 2 * NUM_OUTPUTS)
    assert request.output == expected


@pytest.mark.parametrize("seed", range(4))
def test_any_course_of_proposals_beside_others_gives_the_same_tokens(
    model: LoadedModel, alone: list[list[int]], seed: int
) -> None:
    """Some rows have proposals, right, wrong or both, some have none; some are retracted and resume."""
    chance = random.Random(seed)
    bench, requests = new_bench(model), new_requests()
    num_more = 0
    while open_ones := [request for request in requests if len(request.output) < NUM_OUTPUTS]:
        parts, proposals = [], {}
        for request in open_ones:
            if request.row >= 0 and chance.random() < 0.05:
                bench.writer.release(request)
                request.num_expected = 0
            left = (request.num_expected if request.row >= 0 else len(request.token_ids)) - request.num_planned
            parts.append((request, chance.choice([left, chance.randint(1, left)])))
            if parts[-1][1] == left and chance.random() < 0.7:
                num_ids, start = chance.randint(1, 4), len(request.output) + 1
                ids = alone[request.number][start : start + num_ids]
                ids[chance.randrange(len(ids) + 1) :] = [chance.randrange(SHAPE.vocab_size)]
                proposals[request.number] = ids
        num_before = sum(len(request.output) for request in requests)
        bench.take(bench.launcher.launch(bench.writer.plan(*parts, proposals=proposals)))
        num_more += sum(len(request.output) for request in requests) - num_before > len(parts)
    assert num_more > 0
    for request in requests:
        assert request.output == alone[request.number][: len(request.output)]


def test_rows_that_are_run_one_by_one_get_one_token_each(
    model: LoadedModel, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = new_requests()[:2]
    bench = new_bench(model)
    bench.run(*((request, len(request.prompt)) for request in requests))
    bench.refuse_rows_together(monkeypatch)
    assert bench.verify(requests[0], alone[0][1:4], (requests[1], 1)) == 1
    assert bench.verify(requests[1], alone[1][2:5]) == 1
    monkeypatch.undo()
    assert bench.verify(requests[0], alone[0][2:5], (requests[1], 1)) == 4
    for request in requests:
        assert request.output == alone[request.number][: len(request.output)]


def test_a_proposal_without_usable_logits_stands_no_more_and_leaves_nothing(
    model: LoadedModel, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = new_requests()[0]
    bench = started(model, request)
    compute = bench.runner.logits

    def spoiled(normed: torch.Tensor) -> torch.Tensor:
        logits = compute(normed)
        logits[2:] = float("nan")
        bench.kv_cache.values[:, request.pages[-1], 3] = float("nan")
        return logits

    monkeypatch.setattr(bench.runner, "logits", spoiled)
    num_room = -(len(request.prompt) + 1) % 4 + 4  # the last proposal is the last of the last page
    assert bench.verify(request, alone[0][1 : 1 + num_room]) == 2
    monkeypatch.undo()
    assert not bench.kv_cache.values.isnan().any()
    bench.finish_all([request], 2 * NUM_OUTPUTS)
    assert request.output == alone[0]


def test_a_row_that_has_left_before_its_proposals_are_verified(model: LoadedModel, alone: list[list[int]]) -> None:
    requests = new_requests()[:2]
    bench = new_bench(model)
    bench.run(*((request, len(request.prompt)) for request in requests))
    pending = bench.launcher.launch(bench.writer.plan((requests[0], 1), proposals={0: alone[0][1:4]}))
    bench.writer.release(requests[0])
    again = Request(7, requests[0].prompt)
    later = bench.launcher.launch(bench.writer.plan((again, len(again.prompt)), (requests[1], 1)))
    bench.take(pending)
    bench.take(later)
    bench.finish_all([again, requests[1]])
    assert again.output == alone[0][:NUM_OUTPUTS]
    assert requests[1].output == alone[1][:NUM_OUTPUTS]


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        (replace(GREEDY, rules=LogitRules(presence_penalty=1.0)), "cannot be verified"),
        (replace(GREEDY, num_logprobs=0), "cannot be verified"),
    ],
)
def test_proposals_for_what_depends_on_more_than_its_logits_are_a_fault_of_the_plan(
    model: LoadedModel, sampling: SamplingParams, problem: str
) -> None:
    request = Request(1, [1, 2, 3], sampling)
    bench = started(model, request)
    with pytest.raises(PlanError, match=problem):
        bench.launcher.launch(bench.writer.plan((request, 1), proposals={1: [5]}))


def test_plans_that_cannot_be(model: LoadedModel) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"proposal_ids": pack_int32([SHAPE.vocab_size])}, "are proposed"),
        ({"samples": b"\0"}, "cannot be verified"),
        ({"page_rows": b"", "page_counts": b"", "page_ids": b""}, "too few pages"),
        ({"proposal_counts": pack_int32([2]), "proposal_ids": pack_int32([1, 1])}, "computes nothing"),
    ]
    for change, problem in changes:
        request = Request(1, [1, 2, 3, 4])
        bench = started(model, request)
        with pytest.raises(PlanError, match=problem):
            bench.launcher.launch(replace(bench.writer.plan((request, 1), proposals={1: [5]}), **change))
    request = Request(1, [1, 2, 3])
    bench = started(model, request)
    bench.launcher.launch(bench.writer.plan((request, 1), proposals={1: [5]}))
    with pytest.raises(PlanError, match="before its proposals are verified"):
        bench.launcher.launch(bench.writer.plan((request, 1)))


def test_followers_end_at_the_first_that_is_wrong_or_failed() -> None:
    right = [False] * 3
    assert followers([4, 5, 6], 4, [5, 6, 7], right) == [5, 6, 7]
    assert followers([4, 5, 6], 3, [5, 6, 7], right) == []
    assert followers([4, 5, 6], 4, [5, 9, 7], right) == [5, 9]
    assert followers([4, 5, 6], 4, [5, 6, 7], [False, True, False]) == [5]
    assert followers([4, 5, 6], 4, [], []) == []
