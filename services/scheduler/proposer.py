"""scheduler: what one answer may go on with, guessed from its own ids, and how far such guesses are worth trying.

It owns the index of the answer's ids and what was learned from the proposals so far. A proposal is never a token: the
worker samples as it would without, and only ids that it sampled count.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.ngram_index import NgramIndex

FIRST_IDS = 4
"""Length of a first proposal, if so many are allowed: a CPU computes about so many tokens for the price of one."""

MOST_MISSES = 2
"""Proposals in a row of which nothing stood, before a rest."""

FIRST_REST_STEPS = 16
MOST_REST_STEPS = 512
_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """What the operator allows.

    Attributes:
        most_ids: longest proposal, >= 1.
        min_match: ids that must have come before in the same order, >= 1.
        step_tokens: most tokens of a step in which something is proposed, those of prompts apart.
    """

    most_ids: int
    min_match: int
    step_tokens: int

    @property
    def most_rows(self) -> int:
        """Most running requests beside which anything is proposed: each has its own token to compute, and one more."""
        return self.step_tokens // 2


class Proposer:
    """The guesses about one request."""

    __slots__ = (
        "_index", "_most_ids", "_num_misses", "_num_tokens", "_place", "_rest_steps", "has_waited", "num_ids",
        "rests_until",
    )  # fmt: skip

    def __init__(self, limits: SpeculationLimits) -> None:
        self.num_ids = min(FIRST_IDS, limits.most_ids)
        """How many ids the next proposal should have."""
        self.rests_until = 0
        """The step from which on it proposes again."""
        self.has_waited = False
        """Whether a step was held back for what it will propose."""
        self._most_ids = limits.most_ids
        self._index = NgramIndex(limits.min_match)
        self._num_tokens = self._place = 0  # what was found when there were so many tokens
        self._num_misses = 0
        self._rest_steps = FIRST_REST_STEPS

    def find(self, token_bytes: bytearray) -> bool:
        """Whether the newest ids have come before; `token_bytes` is the column of all known ids."""
        num_tokens = len(token_bytes) // _ID_BYTES
        if num_tokens != self._num_tokens:
            self._num_tokens, self._place = num_tokens, self._index.find(token_bytes)
        return self._place > 0

    def proposal(self, token_bytes: bytearray, num_ids: int) -> bytes:
        """What followed then, `num_ids` >= 1 of them as an int32 column; behind the newest id it begins again.

        To be called when `find` has found something for the same ids.
        """
        following = bytes(token_bytes[self._place * _ID_BYTES :][: num_ids * _ID_BYTES])
        return (following * -(-num_ids * _ID_BYTES // len(following)))[: num_ids * _ID_BYTES]

    def learn(self, num_proposed: int, num_accepted: int, step: int) -> None:
        """How a proposal fared in that step.

        One that stood makes the next one longer, up to twice; else the next one is tried for one id more than stood.
        """
        if not num_accepted:
            self.num_ids = 1
            self.miss(step)
            return
        self._num_misses, self._rest_steps = 0, FIRST_REST_STEPS
        if num_accepted == num_proposed:
            self.num_ids = min(self._most_ids, max(self.num_ids, 2 * num_proposed))
        else:
            self.num_ids = min(self._most_ids, num_accepted + 1)

    def miss(self, step: int) -> None:
        """Nothing stood, or nothing was left to propose: after some of these it rests, each time for longer."""
        self._num_misses += 1
        if self._num_misses >= MOST_MISSES:
            self._num_misses, self.rests_until = 0, step + self._rest_steps
            self._rest_steps = min(2 * self._rest_steps, MOST_REST_STEPS)
