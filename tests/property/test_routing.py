"""The order of workers against a naive one, and the backlog against a recount, over whatever comes in."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.backlog import ANSWER_TOKENS, Backlog, Errand
from services.scheduler.routing import (
    IMBALANCE_FACTOR,
    LEAST_PREFIX_SHARE,
    SLACK_TOKENS,
    Offer,
    RoundRobin,
    by_prefix,
)
from services.wire.columns import pack_int32

PAGE_SIZE = 4


@st.composite
def offers_for(draw: st.DrawFn) -> tuple[list[Offer], int]:
    """A prompt's length, and what up to five workers offer for it."""
    num_prompt = draw(st.integers(1, 4000))
    fields = st.tuples(
        st.integers(0, num_prompt), st.integers(0, 20_000), st.sampled_from([0.1, 0.5, 1.0, 4.0]), st.integers(0, 9999)
    )
    drawn = draw(st.lists(fields, min_size=1, max_size=5))
    offers = [Offer(bytes([number]), prefix, load, ms, done) for number, (prefix, load, ms, done) in enumerate(drawn)]
    return offers, num_prompt


def naive_first(offers: list[Offer], num_prompt: int) -> Offer:
    """Which worker is asked first, found by comparing all with all."""
    costs = {offer.worker: offer.load_ms + (num_prompt - offer.num_prefix) * offer.token_ms for offer in offers}
    least = min(costs.values())
    near = [
        offer for offer in offers if costs[offer.worker] <= IMBALANCE_FACTOR * least + SLACK_TOKENS * offer.token_ms
    ]
    assert near, "the cheapest is always within the bound"
    drawing = [offer for offer in near if offer.num_prefix >= LEAST_PREFIX_SHARE * num_prompt]
    longest = max((offer.num_prefix for offer in drawing), default=0)
    best = [offer for offer in drawing if offer.num_prefix == longest] if longest else near
    cheapest = min(costs[offer.worker] for offer in best)
    best = [offer for offer in best if costs[offer.worker] == cheapest]
    least_given = min(offer.num_given for offer in best)
    return next(offer for offer in best if offer.num_given == least_given)


@given(offers_for())
def test_the_first_is_the_one_that_comparing_all_with_all_finds(case: tuple[list[Offer], int]) -> None:
    offers, num_prompt = case
    order = by_prefix(offers, num_prompt)
    assert order[0] == naive_first(offers, num_prompt)
    assert sorted(offer.worker for offer in order) == [offer.worker for offer in offers]


@given(offers_for())
def test_nobody_is_asked_first_whose_work_is_beyond_the_bound(case: tuple[list[Offer], int]) -> None:
    offers, num_prompt = case
    first = by_prefix(offers, num_prompt)[0]
    least = min(offer.load_ms + (num_prompt - offer.num_prefix) * offer.token_ms for offer in offers)
    assert first.load_ms <= IMBALANCE_FACTOR * least + SLACK_TOKENS * first.token_ms


@given(st.integers(1, 5), st.integers(1, 30))
def test_round_robin_asks_each_as_often(num_workers: int, num_rounds: int) -> None:
    offers = [Offer(bytes([number]), 0, 0.0, 1.0, 0) for number in range(num_workers)]
    routing = RoundRobin()
    firsts = [routing(offers, 10)[0].worker for _ in range(num_rounds * num_workers)]
    assert {firsts.count(offer.worker) for offer in offers} == {num_rounds}


@dataclass
class Given:
    """One request as the recount knows it."""

    prompt: list[int]
    errand: Errand
    num_new: int
    is_prefilled: bool = False


def longest_common(prompt: list[int], others: list[list[int]]) -> int:
    """Tokens of whole pages that a prompt shares with the most alike of the others."""
    best = 0
    for other in others:
        num_pages = 0
        end = PAGE_SIZE
        while end <= min(len(prompt), len(other)) and prompt[:end] == other[:end]:
            num_pages, end = num_pages + 1, end + PAGE_SIZE
        best = max(best, num_pages * PAGE_SIZE)
    return best


_PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
_EVENTS = st.one_of(
    st.tuples(st.just("give"), _PROMPTS), st.tuples(st.sampled_from(["prefilled", "end"]), st.integers(0, 99))
)


@given(st.lists(_EVENTS, max_size=40))
def test_a_backlog_is_what_a_recount_of_the_open_requests_says(events: list[tuple[str, list[int] | int]]) -> None:
    backlog = Backlog(PAGE_SIZE, token_ms=2.0)
    known: list[Given] = []
    for kind, value in events:
        if isinstance(value, list):
            column = pack_int32(value)
            num_prefix = backlog.promised(b"", column)
            assert num_prefix == longest_common(value, [each.prompt for each in known])
            assert backlog.promised(b"other", column) == 0
            known.append(Given(value, backlog.give(b"", column, num_prefix), len(value) - num_prefix))
        elif known:
            each = known[value % len(known)]
            if kind == "prefilled":
                backlog.prefilled(each.errand)
                each.is_prefilled = True
            else:
                backlog.end(each.errand)
                known.remove(each)
        pending = sum(each.num_new for each in known if not each.is_prefilled)
        assert backlog.load_ms == 2.0 * (pending + ANSWER_TOKENS * len(known))
