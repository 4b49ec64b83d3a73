"""scheduler: what one answer may go on with, guessed from its own ids, and how far such guesses are worth trying.

It owns the index of the answer's ids and what was learned from the proposals so far. A proposal is never a token: the
worker samples as it would without, and only ids that it sampled count.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.ngram_index import NgramIndex

FIRST_IDS = 4
"""Length of a first proposal, and of one after a failure, if so many are allowed."""

COST_IDS = 1
"""Ids that must stand for a step with proposals to be no loss: on a CPU it takes as long as about two without
(`python -m bench.verify_cost`)."""

MOST_LOST_IDS = 2
MOST_WON_IDS = 4
"""Where the account of what proposals won and cost ends: at the lower end the request rests."""

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
        "_index", "_most_ids", "_num_tokens", "_num_won", "_place", "_rest_steps", "has_waited", "num_ids",
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
        self._num_won = 0  # ids that stood, less what that cost
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

        One that stood as a whole makes the next one longer, up to twice; else the next is one id longer than what
        stood, but not shorter than the first. Who has lost too much rests, each time for longer until it wins again.
        """
        if num_accepted == num_proposed:
            self.num_ids = min(self._most_ids, max(self.num_ids, 2 * num_proposed))
        else:
            self.num_ids = min(self._most_ids, max(FIRST_IDS, num_accepted + 1))
        if num_accepted > COST_IDS:
            self._rest_steps = FIRST_REST_STEPS
        self._num_won = min(MOST_WON_IDS, self._num_won + num_accepted - COST_IDS)
        if self._num_won <= -MOST_LOST_IDS:
            self._num_won, self.rests_until = 0, step + self._rest_steps
            self._rest_steps = min(2 * self._rest_steps, MOST_REST_STEPS)
