"""scheduler: what one answer may go on with, guessed from its own ids, and how far such guesses are worth trying.

It owns the index of the answer's ids and what was learned from the proposals so far. A proposal is never a token: the
worker samples as it would without, and only ids that it sampled count.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.ngram_index import NgramIndex

FIRST_IDS = 4
"""Length of a first proposal, and of one after a failure, if so many are allowed."""

PROPOSALS_PER_STEP = 6
"""Proposals that a CPU verifies in the time of a step without (`python -m bench.verify_cost`): each costs a sixth of
what an id that stands saves."""

MOST_LOST_STEPS = 2
MOST_WON_STEPS = 4
"""Where the account of what proposals saved and cost ends: at the lower end the request rests."""

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
        "_account", "_index", "_most_ids", "_num_tokens", "_place", "_rest_steps", "has_waited", "num_ids",
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
        self._account = 0  # steps that were saved, less those that it cost; counted in proposals
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
        stood, but not shorter than the first. Who has lost too much rests, each time for longer until it gains again.
        """
        if num_accepted == num_proposed:
            self.num_ids = min(self._most_ids, max(self.num_ids, 2 * num_proposed))
        else:
            self.num_ids = min(self._most_ids, max(FIRST_IDS, num_accepted + 1))
        self._enter(num_accepted * PROPOSALS_PER_STEP - num_proposed, step)

    def note_vain_wait(self, step: int) -> None:
        """That step was held back for a proposal, and there is none: as dear as a proposal that does not stand."""
        self._enter(-1, step)

    def _enter(self, gain: int, step: int) -> None:
        if gain > 0:
            self._rest_steps = FIRST_REST_STEPS
        self._account = min(self._account + gain, MOST_WON_STEPS * PROPOSALS_PER_STEP)
        if self._account <= -MOST_LOST_STEPS * PROPOSALS_PER_STEP:
            self._account, self.rests_until = 0, step + self._rest_steps
            self._rest_steps = min(2 * self._rest_steps, MOST_REST_STEPS)
