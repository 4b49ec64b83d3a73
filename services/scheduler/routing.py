"""scheduler: which of several workers a request goes to. Pure: offers in, an order out.

    cost of an offer   the work that the worker has been given + the tokens of the prompt that it would have to compute
    within the bound   cost <= IMBALANCE_FACTOR x the least cost + SLACK_TOKENS
    order              within the bound: the longest prefix, then the least cost; beyond it: the least cost

So a prefix draws requests to its worker until others would answer sooner by computing it again; from then on they hold
it too, and the prefix that most want is where most can be had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

IMBALANCE_FACTOR = 1.5
SLACK_TOKENS = 512  # what four answers count for: fewer would send a prefix elsewhere at every chance crowd
LEAST_PREFIX_SHARE = 0.25  # of a prompt: what everybody's prompts begin with draws nobody


@dataclass(frozen=True, slots=True)
class Offer:
    """What a request would cost one worker.

    Attributes:
        worker: its routing id.
        num_prefix: tokens of the prompt that it holds, or computes for somebody else, in [0, prompt].
        load_ms: how long what it has been given takes it, >= 0.
        token_ms: how long a token of a prompt takes it, > 0.
        num_given: prompt tokens that it ever had to compute; among equals the least goes first, and fills its cache.
    """

    worker: bytes
    num_prefix: int
    load_ms: float
    token_ms: float
    num_given: int


Routing: TypeAlias = Callable[[Sequence[Offer], int], list[Offer]]
"""Puts the offers (at least one) for a prompt of so many tokens into the order in which workers are asked."""


def by_prefix(offers: Sequence[Offer], num_prompt: int) -> list[Offer]:
    """The longest prefix first, as far as the bound of imbalance lets it."""
    least_ms = min(_cost_ms(offer, num_prompt) for offer in offers)

    def rank(offer: Offer) -> tuple[bool, int, float, int]:
        cost_ms = _cost_ms(offer, num_prompt)
        is_beyond = cost_ms > IMBALANCE_FACTOR * least_ms + SLACK_TOKENS * offer.token_ms
        draws = not is_beyond and offer.num_prefix >= LEAST_PREFIX_SHARE * num_prompt
        return is_beyond, -offer.num_prefix if draws else 0, cost_ms, offer.num_given

    return sorted(offers, key=rank)


class RoundRobin:
    """One worker after the other, whatever they hold: what `by_prefix` is measured against."""

    def __init__(self) -> None:
        self._num_routed = 0

    def __call__(self, offers: Sequence[Offer], num_prompt: int) -> list[Offer]:
        """The next one first."""
        first = self._num_routed % len(offers)
        self._num_routed += 1
        return [*offers[first:], *offers[:first]]


def routing_of(name: str) -> Routing:
    """The routing of a setting: `prefix` or `round_robin`."""
    return RoundRobin() if name == "round_robin" else by_prefix


def _cost_ms(offer: Offer, num_prompt: int) -> float:
    return offer.load_ms + offer.token_ms * (num_prompt - offer.num_prefix)
