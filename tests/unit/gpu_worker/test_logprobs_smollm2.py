"""The real model's log-probabilities and pooled hidden states against transformers', from a file of 20 prompts.

tests/integration/reference/logprobs.json was made by transformers in float32 from the same weights (make_logprobs.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.weights import LoadedModel, load_model
from services.model_files.source import open_model
from services.wire.request_params import PromptParams, SamplingParams, Task
from tests.unit.gpu_worker.plan_writer import Entries, Request
from tests.unit.gpu_worker.step_bench import CPU, Bench, new_bench

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOP = 5
WITHIN = 1e-3
_PATH = Path(__file__).parents[2] / "integration" / "reference" / "logprobs.json"
_PROMPTS: list[dict[str, Any]] = json.loads(_PATH.read_text("utf-8"))["prompts"]
_GREEDY = SamplingParams(0.0, 1.0, 0, 0.0, 0, 0, num_logprobs=NUM_TOP)
_HOT = SamplingParams(2.0, 1.0, 0, 0.0, 5, 0, num_logprobs=NUM_TOP)
_ALL_OF_PROMPT = PromptParams(num_logprobs=NUM_TOP)
_MAX_ROWS = 6


@dataclass
class _Asked:
    """A request and what transformers says of it."""

    request: Request
    reference: dict[str, Any]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_model(open_model(smollm2_path), CPU)


def asked_for(first: int, sampling: SamplingParams, prompt: PromptParams) -> list[_Asked]:
    """Requests for as many of the prompts as there are rows."""
    return [
        _Asked(Request(number, reference["prompt_ids"], sampling, prompt_params=prompt), reference)
        for number, reference in enumerate(_PROMPTS[first : first + _MAX_ROWS], start=first)
    ]


def run(bench: Bench, asked: list[_Asked], chunk: int, num_outputs: int) -> None:
    """Prompts in chunks, each as far as it is in a step of its own length; then tokens, all at once."""
    requests = [each.request for each in asked]
    while open_ones := [r for r in requests if len(r.output) < num_outputs]:
        parts = [(r, (r.num_expected or len(r.token_ids)) - r.num_planned) for r in open_ones]
        bench.run(*((request, min(left, chunk)) for request, left in parts))
    for request in requests:
        bench.writer.release(request)


def assert_equal(entries: Entries, own_id: int, own: float | None, likeliest: list[tuple[int, float]]) -> None:
    """The token's own entry, and the likeliest in order (two that are nearly equal may change places)."""
    assert entries[0][0] == own_id
    if own is not None:
        assert entries[0][1] == pytest.approx(own, abs=WITHIN)
    assert [value for _, value in entries[1:]] == pytest.approx([value for _, value in likeliest], abs=WITHIN)
    expected = dict(likeliest)
    for token_id, value in entries[1:]:
        assert value == pytest.approx(expected.get(token_id, likeliest[-1][1]), abs=WITHIN)


def assert_prompt(asked: _Asked) -> None:
    request, reference = asked.request, asked.reference
    assert sorted(request.prompt_logprobs) == list(range(1, len(request.prompt)))
    for position, own in enumerate(reference["prompt"], start=1):
        likeliest = reference["prompt_top"].get(str(position))
        entries = request.prompt_logprobs[position]
        assert entries[0][1] == pytest.approx(own, abs=WITHIN)
        if likeliest is not None:
            assert_equal(entries, request.prompt[position], own, likeliest)


@pytest.mark.parametrize("chunk", [1000, 7])
@pytest.mark.parametrize("first", range(0, 20, _MAX_ROWS))
def test_smp_15_of_20_prompts_and_their_greedy_answers_whole_and_in_chunks(
    model: LoadedModel, first: int, chunk: int
) -> None:
    asked = asked_for(first, _GREEDY, _ALL_OF_PROMPT)
    run(new_bench(model, page_size=16), asked, chunk, 6)
    for each in asked:
        assert_prompt(each)
        assert each.request.output[:6] == each.reference["output_ids"]
        for token_id, entries, likeliest in zip(
            each.request.output, each.request.logprobs, each.reference["output_top"], strict=False
        ):
            assert_equal(entries, token_id, likeliest[0][1], likeliest)


def test_smp_15_at_temperature_2_the_values_are_those_of_the_raw_logits(model: LoadedModel) -> None:
    asked = asked_for(0, _HOT, PromptParams())
    run(new_bench(model, page_size=16), asked, 1000, 1)
    for each in asked:
        likeliest = each.reference["output_top"][0]
        own = dict(map(tuple, likeliest)).get(each.request.output[0])
        assert_equal(each.request.logprobs[0], each.request.output[0], own, likeliest)


def test_smp_15_the_fixed_prompt_of_the_failure_bank(model: LoadedModel) -> None:
    (asked,) = asked_for(0, _GREEDY, PromptParams())[:1]
    run(new_bench(model, page_size=16), [asked], 1000, 1)
    values = [value for _, value in asked.request.logprobs[0]]
    assert values == pytest.approx([-0.077, -0.077, -3.577, -5.007, -5.377, -5.411], abs=2e-3)


def test_smp_15_through_the_prefix_cache(model: LoadedModel) -> None:
    """The first pages come from the cache; what is wanted begins behind them."""
    bench = new_bench(model, page_size=4)
    for number, reference in enumerate(_PROMPTS[:_MAX_ROWS]):
        ids = reference["prompt_ids"]
        first = Request(number, ids)
        bench.run((first, len(ids)))
        num_cached = (len(ids) - 1) // 4 // 2
        wanted = PromptParams(num_logprobs=NUM_TOP, logprobs_from=4 * num_cached + 1)
        second = Request(100 + number, ids, _GREEDY, prompt_params=wanted)
        bench.writer.start_with_prefix(second, first.pages[:num_cached])
        while not second.output:
            bench.run((second, min(5, len(ids) - second.num_planned)))
        assert sorted(second.prompt_logprobs) == list(range(4 * num_cached + 1, len(ids)))
        for position, entries in second.prompt_logprobs.items():
            assert entries[0][1] == pytest.approx(reference["prompt"][position - 1], abs=WITHIN)
        assert_equal(second.logprobs[0], second.output[0], None, reference["output_top"][0])
        bench.writer.release(first, keeps_pages=True)  # the second one gives them back
        bench.writer.release(second)


@pytest.mark.parametrize("task", [Task.EMBED_LAST, Task.EMBED_MEAN])
def test_embeddings_of_transformers(model: LoadedModel, task: Task) -> None:
    bench = new_bench(model, page_size=16)
    for number, reference in enumerate(_PROMPTS):
        ids = reference["prompt_ids"]
        request = Request(number, ids, samples=False, prompt_params=PromptParams(task=task))
        while request.num_planned < len(ids):
            bench.run((request, min(50, len(ids) - request.num_planned)))
        name = "last" if task == Task.EMBED_LAST else "mean"
        length = reference[f"{name}_length"]
        assert torch.tensor(request.embedding).norm().item() == pytest.approx(length, rel=1e-4)
        assert request.embedding[:8] == pytest.approx(reference[f"{name}_state"], abs=1e-4 * length)
        bench.writer.release(request)
