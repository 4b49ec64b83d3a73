"""Many requests at once have the texts they have alone: greedy against transformers, seeded against themselves."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.integration.client import CHAT, HELLO, HI, NUM, NUM_TEXT, TEXT, Client, all_at_once, streamed
from tests.unit.tokenizer.http_client import EventReader

pytestmark = pytest.mark.timeout(900)
REFERENCE = json.loads((Path(__file__).parent / "reference" / "greedy.json").read_text("utf-8"))["answers"]
SEEDED = {"temperature": 0.9, "max_tokens": 16, "ignore_eos": True}


def test_sixty_four_streams_at_once_have_the_texts_they_have_alone(page_1: Client, tokenizer: Tokenizer) -> None:
    """Mixed prompts and lengths; alone is what transformers gave, cut to the length and decoded whole."""
    asked = [(REFERENCE[number % len(REFERENCE)], 4 + number % 13) for number in range(64)]
    answers = all_at_once(
        [
            partial(page_1.stream, TEXT, prompt=each["prompt_ids"], max_tokens=length, ignore_eos=True)
            for each, length in asked
        ]
    )
    for answer, (each, length) in zip(answers, asked, strict=True):
        assert answer.text == tokenizer.decode(each["ids"][:length], skip_special_tokens=True), each["name"]
        assert (answer.completion_tokens, answer.finish_reason) == (length, "length")
        assert answer.prompt_tokens == len(each["prompt_ids"])


def test_smp_10_a_seeded_answer_is_the_same_alone_and_among_fifteen_others(page_1: Client) -> None:
    seeded = partial(page_1.stream, TEXT, prompt=NUM, seed=42, **SEEDED)
    alone = [seeded() for _ in range(2)]
    others = [partial(page_1.stream, TEXT, prompt=HELLO, **SEEDED) for _ in range(8)]
    others += [partial(page_1.stream, TEXT, prompt=NUM, seed=seed, **SEEDED) for seed in range(7)]
    among = all_at_once([*others[:8], seeded, *others[8:]])
    assert {answer.text for answer in (*alone, among[8])} == {alone[0].text}
    assert [answer.completion_tokens for answer in (*alone, among[8])] == [16] * 3
    assert alone[0].text != NUM_TEXT[: len(alone[0].text)]


@pytest.mark.slow
def test_smp_10_zero_is_a_seed_and_none_is_a_new_one_each_time(page_1: Client) -> None:
    for seed, num_texts in ((0, 1), (None, 2)):
        texts = {page_1.ask(TEXT, prompt=NUM, seed=seed, **SEEDED).text for _ in range(2)}
        assert len(texts) == num_texts


@pytest.mark.slow
def test_choices_of_a_seeded_request_differ_and_come_again(page_1: Client) -> None:
    hot = SEEDED | {"temperature": 1.5}
    answers = [page_1.ask(TEXT, prompt=NUM, seed=7, n=3, **hot).texts for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 3


def test_sch_04_eight_identical_prompts_at_once_have_the_text_of_one(page_1: Client) -> None:
    prompt = "Once upon a time there was a number:" + NUM  # nobody has asked it before
    fields = {"max_tokens": 12, "ignore_eos": True}
    together = all_at_once([partial(page_1.stream, TEXT, prompt=prompt, **fields) for _ in range(8)])
    alone = page_1.ask(TEXT, prompt=prompt, **fields)
    assert [answer.outcome for answer in together] == [alone.outcome] * 8


@pytest.mark.slow
def test_met_04_gauges_return_to_zero_when_everybody_leaves(page_1: Client) -> None:
    """64 run, 20 wait, and all close their sockets at once."""
    body = streamed({"prompt": NUM, "max_tokens": 200, "ignore_eos": True})  # all 64 must seem to fit
    with ExitStack() as stack:
        connections = [stack.enter_context(page_1.connect()) for _ in range(84)]
        for connection in connections:
            connection.send("POST", TEXT, body)
        page_1.wait_for_load(64, 20)
        EventReader(connections[0]).next_json()
    page_1.wait_idle()
    assert page_1.ask(CHAT, messages=HI, max_tokens=1).text == "Hello"


@pytest.mark.slow
def test_the_same_thousand_tokens_are_found_in_the_cache(page_1: Client) -> None:
    """The second request with a prefix of 1,000 tokens; bench/prefix_cache.py measures what that saves."""
    prefix = [3000 + number for number in range(1000)]
    first = page_1.ask(TEXT, prompt=[*prefix, 100], max_tokens=1)
    second = page_1.ask(TEXT, prompt=[*prefix, 101], max_tokens=1)
    assert (first.cached_tokens, second.cached_tokens) == (0, 1000)
