"""The real model's greedy texts equal transformers', whatever the pipeline does underneath.

reference/greedy.json was made by transformers in float32 from the same weights (reference/make_reference.py). Every
combination of page size, plans ahead, chunk size, prefix cache, and one request at a time or all twenty at once runs
in `make test-all`; `make test-pairwise` runs six, in which every two values of two settings meet; `make test` one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.server import Server, running

_REFERENCE = json.loads((Path(__file__).parent / "reference" / "greedy.json").read_text("utf-8"))
_ANSWERS = _REFERENCE["answers"]
_NUM_TOKENS = 64


@dataclass(frozen=True)
class Combination:
    """One way to run the pipeline."""

    page_size: int
    plans_ahead: int
    chunk_tokens: int
    caches_prefixes: bool
    num_at_once: int

    def __str__(self) -> str:
        cache = "cache" if self.caches_prefixes else "no cache"
        sizes = f"page {self.page_size}, ahead {self.plans_ahead}, chunk {self.chunk_tokens}"
        return f"{sizes}, {cache}, {self.num_at_once} at once"


_ALL = len(_ANSWERS)  # at least the sixteen at once that are promised
_VALUES = ((1, 16), (0, 1), (16, 512), (False, True), (1, _ALL))
# One at a time takes longest: it stands in two rows only, the first, which one of two processes takes while the other
# takes the rest. One waits for memory and the other computes.
_PAIRWISE = [
    tuple(values[int(bit)] for values, bit in zip(_VALUES, row, strict=True))
    for row in ("00000", "11110", "11101", "10011", "01011", "00101")
]


def _combinations(rows: Iterable[tuple[int, ...]]) -> list[Combination]:
    return [Combination(page, ahead, chunk, bool(cache), at_once) for page, ahead, chunk, cache, at_once in rows]


def test_the_pairwise_selection_meets_every_two_values() -> None:
    for first, second in itertools.combinations(range(len(_VALUES)), 2):
        met = {(row[first], row[second]) for row in _PAIRWISE}
        assert met == set(itertools.product(_VALUES[first], _VALUES[second]))


@pytest.mark.timeout(300)
def test_greedy_texts_equal_transformers(smollm2_path: Path) -> None:
    with running(smollm2_path) as server:
        _check(server, _ALL)


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.timeout(600)
@pytest.mark.parametrize("combination", _combinations(_PAIRWISE), ids=str)
def test_greedy_texts_equal_transformers_pairwise(combination: Combination, smollm2_path: Path) -> None:
    _check_combination(combination, smollm2_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "combination", _combinations([row for row in itertools.product(*_VALUES) if row not in _PAIRWISE]), ids=str
)
def test_greedy_texts_equal_transformers_in_all_other_ways(combination: Combination, smollm2_path: Path) -> None:
    _check_combination(combination, smollm2_path)


def _check_combination(combination: Combination, smollm2_path: Path) -> None:
    settings = {
        "page_size": combination.page_size,
        "plans_ahead": combination.plans_ahead,
        "chunked_prefill_size": combination.chunk_tokens,
        "enable_prefix_caching": combination.caches_prefixes,
    }
    with running(smollm2_path, num_threads=1, **settings) as server:
        _check(server, combination.num_at_once)
        again = _ANSWERS if combination.caches_prefixes and combination.num_at_once > 1 else _ANSWERS[-1:]
        cached = _check(server, combination.num_at_once, again)
        assert (sum(cached) > 0) is combination.caches_prefixes


def _check(server: Server, num_at_once: int, answers: Sequence[dict[str, Any]] = _ANSWERS) -> list[int]:
    """Asks for answers and compares; returns the cached tokens of each."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240)
    model = client.models.list().data[0].id

    def ask(answer: dict[str, str]) -> tuple[str, int, int]:
        """Text, prompt tokens, cached tokens."""
        if "chat" in answer:
            chat = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": answer["chat"]}],
                temperature=0,
                max_completion_tokens=_NUM_TOKENS,
                extra_body={"ignore_eos": True},
            )
            assert chat.usage is not None
            assert chat.usage.prompt_tokens_details is not None
            cached = chat.usage.prompt_tokens_details.cached_tokens
            return chat.choices[0].message.content or "", chat.usage.prompt_tokens, cached or 0
        plain = client.completions.create(
            model=model,
            prompt=_prompt_of(answer),
            temperature=0,
            max_tokens=_NUM_TOKENS,
            extra_body={"ignore_eos": True},
        )
        assert plain.usage is not None
        assert plain.usage.prompt_tokens_details is not None
        return plain.choices[0].text, plain.usage.prompt_tokens, plain.usage.prompt_tokens_details.cached_tokens or 0

    with ThreadPoolExecutor(num_at_once) as pool:
        results = list(pool.map(ask, answers))
    texts = {answer["name"]: result[0] for answer, result in zip(answers, results, strict=True)}
    assert texts == {answer["name"]: answer["text"] for answer in answers}
    assert [result[1] for result in results] == [len(answer["prompt_ids"]) for answer in answers]
    return [result[2] for result in results]


def _prompt_of(answer: dict[str, str]) -> str:
    prompts = json.loads((Path(__file__).parent / "reference" / "prompts.json").read_text("utf-8"))
    return next(str(prompt["text"]) for prompt in prompts if prompt["name"] == answer["name"])
