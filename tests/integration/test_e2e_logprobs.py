"""Log-probabilities and embeddings over HTTP equal transformers', in chunks, together, and through the prefix cache.

reference/logprobs.json was made by transformers in float32 from the same weights (reference/make_logprobs.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.server import running

pytestmark = [pytest.mark.slow, pytest.mark.surface, pytest.mark.timeout(300)]

_PROMPTS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "reference" / "logprobs.json").read_text("utf-8"))[
    "prompts"
]
_NUM_TOKENS, _NUM_TOP, _WITHIN = 6, 5, 1e-3
_CHUNK_TOKENS = 16


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[openai.OpenAI]:
    with running(smollm2_path, page_size=4, chunked_prefill_size=_CHUNK_TOKENS, plans_ahead=1) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240)


def ask(client: openai.OpenAI, prompt_ids: list[int], **fields: Any) -> dict[str, Any]:
    """The choice of a completion, and how much of the prompt was cached."""
    answer = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=prompt_ids,
        temperature=0,
        max_tokens=_NUM_TOKENS,
        logprobs=_NUM_TOP,
        extra_body={"ignore_eos": True, "return_token_ids": True, **fields},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    choice: dict[str, Any] = answer.choices[0].model_dump()
    return choice | {"cached_tokens": answer.usage.prompt_tokens_details.cached_tokens}


def assert_answer(choice: dict[str, Any], reference: dict[str, Any]) -> None:
    assert choice["token_ids"] == reference["output_ids"]
    own = [likeliest[0][1] for likeliest in reference["output_top"]]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(own, abs=_WITHIN)
    for found, likeliest in zip(choice["logprobs"]["top_logprobs"], reference["output_top"], strict=True):
        expected = [value for _, value in likeliest]
        # Names of tokens are texts here: two that are parts of a character may share one.
        assert min(abs(value - expected[0]) for value in found.values()) < _WITHIN
        assert all(min(abs(value - other) for other in expected) < _WITHIN for value in found.values())


def assert_prompt(choice: dict[str, Any], reference: dict[str, Any]) -> None:
    ids = reference["prompt_ids"]
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(ids)
    for position, (found, own) in enumerate(zip(choice["prompt_logprobs"][1:], reference["prompt"], strict=True), 1):
        assert found[str(ids[position])]["logprob"] == pytest.approx(own, abs=_WITHIN)
        for token_id, value in reference["prompt_top"].get(str(position), ()):
            assert found[str(token_id)]["logprob"] == pytest.approx(value, abs=_WITHIN)


@pytest.mark.timeout(300)
def test_smp_15_sch_12_of_20_prompts_all_at_once_and_again_from_the_cache(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(len(_PROMPTS)) as pool:
        wanted = {"prompt_logprobs": _NUM_TOP}
        choices = list(pool.map(lambda each: ask(client, each["prompt_ids"], **wanted), _PROMPTS))
    for choice, reference in zip(choices, _PROMPTS, strict=True):
        assert_answer(choice, reference)
        assert_prompt(choice, reference)
    num_cached = 0
    for reference in _PROMPTS:
        again = ask(client, reference["prompt_ids"])
        num_cached += again["cached_tokens"]
        assert_answer(again, reference)
    assert num_cached > 100
    # What is cached has no log-probabilities: the prompt is computed again.
    assert_prompt(ask(client, _PROMPTS[0]["prompt_ids"], prompt_logprobs=_NUM_TOP), _PROMPTS[0])


@pytest.mark.timeout(300)
def test_smp_15_the_same_at_temperature_2(client: openai.OpenAI) -> None:
    """The likeliest of the first token are those of the raw logits, whatever is drawn."""
    hot = ask(client, _PROMPTS[0]["prompt_ids"], temperature=2.0, seed=5)
    found = sorted(hot["logprobs"]["top_logprobs"][0].values(), reverse=True)
    expected = [value for _, value in _PROMPTS[0]["output_top"][0]]
    assert found[:_NUM_TOP] == pytest.approx(expected, abs=_WITHIN)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_hidden_states_of_transformers(client: openai.OpenAI, pooling: str) -> None:
    answer = client.embeddings.create(
        model=client.models.list().data[0].id,
        input=[reference["prompt_ids"] for reference in _PROMPTS],
        encoding_format="float",
        extra_body={"pooling": pooling, "normalize": False},
    )
    for found, reference in zip(answer.data, _PROMPTS, strict=True):
        length = reference[f"{pooling}_length"]
        assert math.sqrt(sum(value * value for value in found.embedding)) == pytest.approx(length, rel=1e-4)
        assert found.embedding[:8] == pytest.approx(reference[f"{pooling}_state"], abs=1e-4 * length)
