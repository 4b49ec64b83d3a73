"""Rules in running steps: a request gets the tokens that it gets alone, and those that the plain rules give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.weights import LoadedModel
from services.wire.finish import Finish
from services.wire.request_params import LogitRules, SamplingParams
from tests.unit.gpu_worker.plan_writer import GREEDY, Request
from tests.unit.gpu_worker.rule_reference import ruled, rules
from tests.unit.gpu_worker.step_bench import NUM_OUTPUTS, new_bench
from tests.unit.gpu_worker.step_driver import StepDriver

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[7, 3, 7], [1] * 9, [20, 30, 40, 50, 60, 20], [119], [5, 4, 3, 2, 1]]


def plain_outputs(model: LoadedModel, prompt: list[int], wanted: LogitRules | None) -> list[int]:
    """Greedy decoding with the rules applied one id at a time."""
    driver = StepDriver(model, ReferenceAttention(), 4, 64)
    row = driver.add(prompt + [0] * NUM_OUTPUTS)
    driver.step((row, len(prompt)))
    output: list[int] = []
    for index in range(len(prompt), len(prompt) + NUM_OUTPUTS):
        logits = row.logits[-1][-1].tolist()
        changed = ruled(logits, wanted, prompt, output) if wanted is not None else logits
        output.append(max(range(len(changed)), key=lambda at, values=changed: values[at]))  # type: ignore[misc]
        row.token_ids[index] = output[-1]
        driver.step((row, 1))
    return output


def all_rules(model: LoadedModel) -> list[LogitRules | None]:
    """One for each prompt, which change what the model says without any."""
    first = [plain_outputs(model, prompt, None) for prompt in PROMPTS]
    return [
        rules(frequency=0.9, presence=0.4, repetition=1.4),
        rules(bad_words=[first[1][:1], first[1][1:3]], min_tokens=5, stops=[first[1][0], first[1][1]]),
        None,
        rules(biases={first[3][0]: -100.0, 17: 4.0}, presence=1.0),
        rules(allowed=list(range(10, 60)), repetition=0.8),
    ]


def requests_with(model: LoadedModel, sampling: SamplingParams) -> list[Request]:
    return [
        Request(number, prompt, replace(sampling, seed=number, rules=wanted, num_logprobs=number - 1))
        for number, (prompt, wanted) in enumerate(zip(PROMPTS, all_rules(model), strict=True))
    ]


def test_smp_12_greedy_answers_equal_the_plain_rules(model: LoadedModel) -> None:
    requests = requests_with(model, GREEDY)
    new_bench(model).finish_all(requests)
    for request in requests:
        assert request.output == plain_outputs(model, request.prompt, request.sampling.rules)
        if request.sampling.rules is not None:
            assert request.output != plain_outputs(model, request.prompt, None)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.2, 0.9, 0, 0.0, 0, 0)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("plans_ahead", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_smp_10_rules_give_the_same_alone_and_in_any_course(
    model: LoadedModel, sampling: SamplingParams, plans_ahead: int, seed: int
) -> None:
    alone, together = requests_with(model, sampling), requests_with(model, sampling)
    for request in alone:
        new_bench(model).finish_all([request])
    new_bench(model).run_any_course(together, seed, plans_ahead)
    for one, other in zip(alone, together, strict=True):
        assert other.output == one.output
        assert [[token_id for token_id, _ in entries] for entries in other.logprobs] == [
            [token_id for token_id, _ in entries] for entries in one.logprobs
        ]


def test_smp_15_log_probabilities_are_those_of_the_raw_logits(model: LoadedModel) -> None:
    requests = requests_with(model, SamplingParams(1.7, 1.0, 5, 0.0, 0, 0))
    new_bench(model).finish_all(requests)
    for request in requests:
        wanted = request.sampling.num_logprobs
        driver = StepDriver(model, ReferenceAttention(), 4, 64)
        row = driver.add(request.token_ids)
        driver.step((row, len(request.token_ids)))
        expected = row.all_logits().log_softmax(1)[len(request.prompt) - 1 : -1]
        if wanted < 0:
            assert request.logprobs == [[]] * NUM_OUTPUTS
            continue
        for token_id, entries, of_all in zip(request.output, request.logprobs, expected, strict=True):
            ids = [token_id, *of_all.topk(wanted).indices.tolist()]
            assert [at for at, _ in entries] == ids
            assert [value for _, value in entries] == pytest.approx(of_all[ids].tolist(), abs=1e-4)


def test_smp_02_a_failed_row_brings_no_log_probabilities(model: LoadedModel) -> None:
    bench, requests = new_bench(model), requests_with(model, GREEDY)
    bench.finish_all(requests, 3)
    bench.kv_cache.keys[:, requests[4].pages[0]] = float("nan")
    bench.finish_all(requests)
    assert [request.finish for request in requests] == [Finish.NONE] * 4 + [Finish.NUMERICAL_ERROR]
    assert [len(request.logprobs) for request in requests] == [NUM_OUTPUTS] * 4 + [3]


def test_prc_05_rules_and_log_probabilities_when_rows_are_run_one_by_one(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = requests_with(model, GREEDY), requests_with(model, GREEDY)
    new_bench(model).finish_all(expected)
    bench = new_bench(model)
    bench.refuse_rows_together(monkeypatch)
    bench.finish_all(found)
    for one, other in zip(found, expected, strict=True):
        assert one.output == other.output
        for entries, of_other in zip(one.logprobs, other.logprobs, strict=True):
            assert [at for at, _ in entries] == [at for at, _ in of_other]
