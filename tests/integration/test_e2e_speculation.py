"""Guessed tokens over HTTP, with the real model in exact numerics: the same answers, in fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration.client import CHAT, HELLO, NUM, TEXT, Client, Json, all_at_once
from tests.integration.server import running

pytestmark = [pytest.mark.slow, pytest.mark.surface, pytest.mark.timeout(900)]

STORY = (
    "The old mill stood by the river for two hundred years. Its wheel turned slowly in the summer and fast in the "
    "spring, when the snow melted in the hills. The miller had three daughters."
)
REPEAT: Json = {"prompt": f"{STORY}\n\nOnce more: {STORY}\n\nOnce more: {STORY[:40]}", "max_tokens": 40}
MANY: list[tuple[str, Json]] = [
    (TEXT, {"prompt": HELLO, "max_tokens": 20}),
    (TEXT, {"prompt": HELLO, "max_tokens": 16, "temperature": 0.8, "seed": 3, "n": 2}),
    (TEXT, {"prompt": HELLO, "max_tokens": 12, "frequency_penalty": 0.5, "min_tokens": 10}),
    (TEXT, {"prompt": NUM, "max_tokens": 40, "stop": ["13, 14"]}),
    (TEXT, {"prompt": NUM, "max_tokens": 10, "logprobs": 2}),
    (TEXT, {"prompt": NUM, "max_tokens": 20, "temperature": 0.5, "top_p": 0.9, "seed": 9, "stop_token_ids": [39]}),
    (TEXT, {"prompt": NUM, "max_tokens": 12, "structured_outputs": {"regex": "( [0-9]+,)+"}}),
    (CHAT, {"messages": [{"role": "user", "content": f"Repeat: {STORY[:60]}"}], "max_tokens": 16}),
]


@pytest.fixture(scope="module")
def guessing(smollm2_path: Path) -> Iterator[Client]:
    with running(smollm2_path, num_threads=1, kv_cache_tokens=4096, speculation="ngram") as server:
        client = Client(server)
        yield client
        client.wait_idle()
        assert "Traceback" not in server.log()


def steps_for(client: Client, body: Json) -> tuple[str, float]:
    """The text, and how many steps it took."""
    client.settle()
    before = client.scheduler("steps_total")
    text = client.ask(TEXT, **body).text
    client.settle()
    return text, client.scheduler("steps_total") - before


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.3, "seed": 5}], ids=["greedy", "seeded"])
def test_a_text_that_repeats_its_prompt_is_the_same_in_fewer_steps(
    guessing: Client, one_by_one: Client, fields: Json
) -> None:
    text, num_steps = steps_for(guessing, REPEAT | fields)
    expected, num_expected = steps_for(one_by_one, REPEAT | fields)
    assert text == expected
    assert text.split("\n")[0] in STORY
    assert num_steps < num_expected / 2
    assert guessing.scheduler("accepted_tokens_total") > 20


def test_all_kinds_of_answers_are_the_same_beside_each_other(guessing: Client, one_by_one: Client) -> None:
    answers = all_at_once([partial(guessing.ask, path, **body) for path, body in MANY])
    for answer, (path, body) in zip(answers, MANY, strict=True):
        assert answer.outcome == one_by_one.ask(path, **body).outcome, body


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(guessing: Client) -> None:
    with guessing.open_stream(TEXT, **(REPEAT | {"max_tokens": 2000, "ignore_eos": True})) as events:
        for _ in range(8):
            events.next()
    guessing.wait_idle()
    assert guessing.scheduler("num_requests_speculating") == 0


def test_the_trace_of_an_answer_tells_what_was_guessed(guessing: Client) -> None:
    response = guessing.request("POST", TEXT, {**REPEAT, "temperature": 0})
    request_id = response.headers["x-request-id"]
    guessing.settle()
    [answer] = guessing.request("GET", f"/trace/{request_id}").json()["answers"]
    counters = [hop["counters"] for hop in answer["hops"] if "proposed_tokens" in hop["counters"]]
    assert counters
    assert 0 < counters[0]["accepted_tokens"] <= counters[0]["proposed_tokens"]
