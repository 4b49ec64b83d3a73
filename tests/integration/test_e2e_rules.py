"""Penalties, biases, bad words, allowed ids and minimum lengths over HTTP, with the real model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.client import HELLO, NUM, NUM_TEXT
from tests.integration.server import running

pytestmark = [pytest.mark.slow, pytest.mark.surface, pytest.mark.timeout(300)]

SEVEN = 39  # the id of `7`
ALL_RULES = {
    "temperature": 0.9,
    "seed": 42,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.2,
    "min_tokens": 12,
    "logit_bias": {"33": 2.0, "28": -1.0},
    "bad_words": [" world", " hello there"],
}


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[openai.OpenAI]:
    with running(smollm2_path, page_size=4, plans_ahead=1) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240)


def ask(client: openai.OpenAI, prompt: str, **fields: Any) -> Any:
    """The only choice, with its ids."""
    wanted = {"temperature": 0, "max_tokens": 20, "return_token_ids": True, "ignore_eos": True} | fields
    answer = client.completions.create(model=client.models.list().data[0].id, prompt=prompt, extra_body=wanted)
    return answer.choices[0]


@pytest.mark.timeout(300)
def test_smp_03_an_id_with_the_lowest_bias_never_comes(client: openai.OpenAI) -> None:
    assert NUM_TEXT.startswith(ask(client, NUM).text)
    assert SEVEN in ask(client, NUM).token_ids
    assert SEVEN not in ask(client, NUM, logit_bias={str(SEVEN): -100}).token_ids
    assert ask(client, NUM, logit_bias={str(SEVEN): 100}, max_tokens=3).token_ids == [SEVEN] * 3


@pytest.mark.timeout(300)
def test_smp_12_penalties_change_greedy_answers_and_the_prompt_counts_for_repetition_alone(
    client: openai.OpenAI,
) -> None:
    plain = ask(client, HELLO, max_tokens=1).token_ids
    assert ask(client, HELLO, max_tokens=1, frequency_penalty=2, presence_penalty=2).token_ids == plain
    assert ask(client, HELLO, max_tokens=1, repetition_penalty=2).token_ids != plain
    repeated, penalized = ask(client, HELLO), ask(client, HELLO, frequency_penalty=2)
    assert len(set(repeated.token_ids)) < len(set(penalized.token_ids))


@pytest.mark.timeout(300)
def test_bad_words_allowed_ids_and_minimum_lengths(client: openai.OpenAI) -> None:
    assert " world" in ask(client, HELLO).text
    assert " world" not in ask(client, HELLO, bad_words=[" world"]).text
    allowed = [33, 34, 35, 28, 216]
    assert set(ask(client, NUM, allowed_token_ids=allowed).token_ids) <= set(allowed)
    stop = ask(client, NUM, max_tokens=3).token_ids[1]
    assert len(ask(client, NUM, stop_token_ids=[stop]).token_ids) == 2
    longer = ask(client, NUM, stop_token_ids=[stop], min_tokens=6).token_ids
    assert len(longer) >= 6
    assert stop not in longer[:6]


@pytest.mark.timeout(600)
def test_smp_10_rules_and_seed_give_the_same_alone_beside_15_others_and_from_the_cache(client: openai.OpenAI) -> None:
    first = ask(client, HELLO, **ALL_RULES).token_ids
    assert ask(client, HELLO, **ALL_RULES).token_ids == first  # its prompt is cached now

    def other(number: int) -> Any:
        prompt = f"{number} little birds sat on a wall, and then"
        rules = {} if number % 3 == 0 else ALL_RULES | {"seed": number, "logprobs": number % 5}
        return ask(client, prompt, **rules)

    with ThreadPoolExecutor(16) as pool:
        others = [pool.submit(other, number) for number in range(15)]
        assert pool.submit(ask, client, HELLO, **ALL_RULES).result().token_ids == first
        for each in others:
            assert each.result().token_ids
