"""How steps are planned must not show: plans ahead, retraction, page sizes, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration.client import HELLO, NUM, NUM_TEXT, TEXT, WAVE, Client, Json, all_at_once
from tests.integration.server import running

pytestmark = pytest.mark.timeout(900)
ENDS: list[tuple[Json, str, str, int]] = [
    ({"max_tokens": 40, "stop_token_ids": [39]}, " 5, 6, ", "stop", 8),
    ({"max_tokens": 5}, " 5, 6", "length", 5),
    ({"max_tokens": 40, "stop": ["7, 8"]}, " 5, 6, ", "stop", 11),
]


@pytest.fixture(scope="module")
def tight(smollm2_path: Path) -> Iterator[Client]:
    """Twelve pages of 16 tokens: three answers of a hundred tokens are let in and do not fit."""
    with running(smollm2_path, num_threads=1, page_size=16, kv_cache_tokens=192) as server:
        client = Client(server)
        yield client
        client.wait_idle()
        assert "Traceback" not in server.log()


def check_ends(client: Client) -> None:
    """Each end alone, and all of them in one batch, two of a kind in the same step; never a chunk after the last."""
    for fields, text, reason, num_tokens in ENDS:
        answer = client.ask_both(TEXT, prompt=NUM, **fields)
        assert (answer.text, answer.finish_reason, answer.completion_tokens) == (text, reason, num_tokens)
    asked = [*ENDS, *ENDS]
    answers = all_at_once([partial(client.stream, TEXT, prompt=NUM, **fields) for fields, *_ in asked])
    for answer, (_, text, reason, num_tokens) in zip(answers, asked, strict=True):
        assert (answer.text, answer.finish_reason, answer.completion_tokens) == (text, reason, num_tokens)


@pytest.mark.slow
def test_sch_20_without_plans_ahead_no_token_is_too_many(one_by_one: Client) -> None:
    check_ends(one_by_one)


@pytest.mark.slow
@pytest.mark.parametrize("plans_ahead", [1, 4])
def test_sch_20_plans_ahead_give_no_token_too_many(smollm2_path: Path, plans_ahead: int) -> None:
    with running(smollm2_path, num_threads=1, plans_ahead=plans_ahead, kv_cache_tokens=4096) as server:
        check_ends(Client(server))


@pytest.mark.slow
def test_sch_09_smp_10_retraction_changes_no_token(tight: Client) -> None:
    """Seeded and greedy answers that lose their pages in the middle go on as if nothing had happened."""
    asked: list[Json] = [
        {"prompt": NUM, "temperature": 0.9, "seed": 42},
        {"prompt": HELLO, "temperature": 0.9, "seed": 43},
        {"prompt": NUM},
        {"prompt": WAVE},
    ]
    fields: Json = {"max_tokens": 96, "ignore_eos": True}
    alone = [tight.stream(TEXT, **each, **fields) for each in asked]
    assert alone[2].text.startswith(NUM_TEXT)
    tight.settle()
    assert tight.scheduler("retracted_total") == 0
    together = all_at_once([partial(tight.stream, TEXT, **each, **fields) for each in asked])
    tight.settle()
    assert tight.scheduler("retracted_total") > 0
    assert [answer.outcome for answer in together] == [answer.outcome for answer in alone]
