"""Log-probabilities and pooled hidden states of prompts in running steps, held against transformers on tiny models."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.gpu_worker import prompt_logprobs
from services.gpu_worker.plan_check import PlanError
from services.gpu_worker.weights import LoadedModel, load_model
from services.model_files.source import open_model
from services.wire.finish import Finish
from services.wire.request_params import PromptParams, Task
from tests.unit.gpu_worker.plan_writer import GREEDY, Request
from tests.unit.gpu_worker.step_bench import CPU, NUM_OUTPUTS, Bench, new_bench
from tests.unit.gpu_worker.tiny_models import VOCAB_SIZE, TinyModel, make_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 2, 13, 30, 7)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder: Path = tmp_path_factory.mktemp("models")
    return make_tiny_model(request.param, folder)


@pytest.fixture(scope="module")
def model(tiny: TinyModel) -> LoadedModel:
    return load_model(open_model(tiny.folder), CPU)


def prompt_of(length: int) -> list[int]:
    chance = random.Random(length)
    return [chance.randrange(VOCAB_SIZE) for _ in range(length)]


def hidden_of(tiny: TinyModel, prompt: list[int]) -> Tensor:
    """[len(prompt), hidden_size], after the final norm."""
    with torch.inference_mode():
        states: Tensor = tiny.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    return states


def run_in_chunks(bench: Bench, requests: list[Request], sizes: int) -> None:
    """All prompts, `sizes` tokens of each in a step."""
    while left := [r for r in requests if r.num_planned < len(r.prompt) and not r.finish]:
        bench.run(*((r, min(sizes, len(r.prompt) - r.num_planned)) for r in left))


def assert_prompt_logprobs(tiny: TinyModel, request: Request) -> None:
    wanted = request.prompt_params
    first = max(1, wanted.logprobs_from)
    assert sorted(request.prompt_logprobs) == list(range(first, len(request.prompt)))
    expected = tiny.logits(request.prompt).log_softmax(1)
    for position, entries in request.prompt_logprobs.items():
        before = expected[position - 1]
        own = request.prompt[position]
        assert [token_id for token_id, _ in entries] == [own, *before.topk(wanted.num_logprobs).indices.tolist()]
        values = before[[token_id for token_id, _ in entries]].tolist()
        assert [value for _, value in entries] == pytest.approx(values, abs=1e-3)


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_smp_15_prompt_log_probabilities_whatever_the_chunks(tiny: TinyModel, model: LoadedModel, chunk: int) -> None:
    requests = [
        Request(
            n,
            prompt_of(length),
            GREEDY,
            samples=n % 2 == 0,
            prompt_params=PromptParams(num_logprobs=n, logprobs_from=1 + n),
        )
        for n, length in enumerate(LENGTHS)
    ]
    plain = Request(9, prompt_of(20))
    run_in_chunks(new_bench(model), [*requests, plain], chunk)
    for request in requests:
        assert_prompt_logprobs(tiny, request)
        assert len(request.output) == request.samples
    assert plain.prompt_logprobs == {}


def test_blocks_of_few_positions_change_nothing(
    tiny: TinyModel, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "MAX_BLOCK", 3 * VOCAB_SIZE)
    request = Request(1, prompt_of(30), prompt_params=PromptParams(num_logprobs=4))
    run_in_chunks(new_bench(model), [request], 30)
    assert_prompt_logprobs(tiny, request)


def test_sch_12_after_a_cached_prefix_and_after_retraction(tiny: TinyModel, model: LoadedModel) -> None:
    bench = new_bench(model)
    first = Request(1, prompt_of(30))
    bench.finish_all([first])
    score = Request(2, prompt_of(30), samples=False, prompt_params=PromptParams(num_logprobs=2, logprobs_from=13))
    bench.writer.start_with_prefix(score, first.pages[:3])
    run_in_chunks(bench, [score], 5)
    assert_prompt_logprobs(tiny, score)
    half = Request(3, prompt_of(30), prompt_params=PromptParams(num_logprobs=1, logprobs_from=4))
    bench.run((half, 11))
    assert max(half.prompt_logprobs) == 11
    bench.writer.release(half)
    half.prompt_params = PromptParams(num_logprobs=1, logprobs_from=12)
    run_in_chunks(bench, [half], 16)
    half.prompt_params = PromptParams(num_logprobs=1, logprobs_from=4)
    assert_prompt_logprobs(tiny, half)


def test_outputs_after_a_retraction_are_no_prompt(model: LoadedModel) -> None:
    bench = new_bench(model)
    request = Request(1, prompt_of(7), prompt_params=PromptParams(num_logprobs=0))
    bench.finish_all([request], 3)
    bench.writer.release(request)
    request.prompt_params = PromptParams(num_logprobs=0, logprobs_from=7)
    request.num_expected = 0
    bench.finish_all([request])
    assert sorted(request.prompt_logprobs) == list(range(1, 7))


def test_smp_02_a_failed_prompt_brings_nothing(tiny: TinyModel, model: LoadedModel) -> None:
    bench = new_bench(model)
    victim = Request(1, prompt_of(13), prompt_params=PromptParams(num_logprobs=1))
    pooled = Request(2, prompt_of(13), samples=False, prompt_params=PromptParams(task=Task.EMBED_MEAN))
    other = Request(3, prompt_of(30), prompt_params=PromptParams(num_logprobs=1))
    bench.run((victim, 5), (pooled, 5), (other, 5))
    for request in (victim, pooled):
        bench.kv_cache.keys[:, request.pages[0]] = float("nan")
    run_in_chunks(bench, [victim, pooled, other], 10)
    assert victim.finish == pooled.finish == Finish.NUMERICAL_ERROR
    assert sorted(victim.prompt_logprobs) == list(range(1, 6))
    assert pooled.embedding == []
    assert_prompt_logprobs(tiny, other)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_embeddings_equal_the_hidden_states(tiny: TinyModel, model: LoadedModel, chunk: int) -> None:
    """Last and mean, beside requests that generate; rows are used again."""
    bench = new_bench(model)
    for start in (0, 100):
        requests = [
            Request(start + n, prompt_of(length + start // 50), samples=False, prompt_params=PromptParams(task=task))
            for n, (length, task) in enumerate(zip(LENGTHS[:4], [Task.EMBED_LAST, Task.EMBED_MEAN] * 2, strict=True))
        ]
        others = [Request(start + n, prompt_of(9)) for n in (50, 51)]
        run_in_chunks(bench, [*requests, *others], chunk)
        bench.finish_all(others)
        for request in requests:
            states = hidden_of(tiny, request.prompt)
            expected = states[-1] if request.prompt_params.task == Task.EMBED_LAST else states.mean(0)
            assert request.embedding == pytest.approx(expected.tolist(), abs=1e-3)
            assert request.output == []
        assert [len(other.output) for other in others] == [NUM_OUTPUTS] * 2
        for request in [*requests, *others]:
            bench.writer.release(request)


def test_prc_05_a_mean_adds_nothing_twice_when_rows_are_run_one_by_one(
    tiny: TinyModel, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = new_bench(model)
    means = [
        Request(n, prompt_of(13 + n), samples=False, prompt_params=PromptParams(task=Task.EMBED_MEAN)) for n in range(2)
    ]
    score = Request(5, prompt_of(30), prompt_params=PromptParams(num_logprobs=1))
    compute = bench.runner.logits
    calls: list[int] = []

    def broken(normed: Tensor) -> Tensor:
        calls.append(len(normed))
        if len(calls) == 2:  # the prompt's logits, once all else of the step is done
            raise MemoryError
        return compute(normed)

    monkeypatch.setattr(bench.runner, "logits", broken)
    bench.run((means[0], 6), (means[1], 6), (score, 6))
    assert calls[:2] == [3, 6]
    run_in_chunks(bench, [*means, score], 6)
    for request in means:
        assert request.embedding == pytest.approx(hidden_of(tiny, request.prompt).mean(0).tolist(), abs=1e-3)
    assert_prompt_logprobs(tiny, score)


@pytest.mark.parametrize("params", [PromptParams(num_logprobs=0, logprobs_from=12), PromptParams(task=Task.EMBED_MEAN)])
def test_a_plan_that_skips_what_is_wanted_is_refused(model: LoadedModel, params: PromptParams) -> None:
    bench = new_bench(model)
    first = Request(1, prompt_of(30))
    bench.finish_all([first])
    late = Request(2, prompt_of(30), prompt_params=params)
    bench.writer.start_with_prefix(late, first.pages[:3])
    with pytest.raises(PlanError, match="starts behind what is wanted of its prompt"):
        bench.run((late, 5))
