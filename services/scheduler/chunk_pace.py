"""scheduler: how many prompt tokens of a step keep it within the time that a chunk may take; learned from its steps.

A worker measures its chunk at the start, alone on a machine at rest. Beside decodes, and with the other processes at
work, the same chunk takes longer. So the time of every step with prompt tokens corrects what one of them is thought to
take: half of the difference where it is longer, a fifth where it is shorter, because one step that is late is what
those who are being answered see, and six tenths of the limit are aimed at, because steps differ even so. Where
nobody is being answered there is nobody to protect, and a chunk costs all that `CoreLimits.prefill_budget` allows.

A step also takes time that does not depend on its tokens: all weights are read once. On a machine so busy that this
alone takes as long as a chunk may, smaller chunks would only read them more often; so none is smaller than a third of
the measured one.

What a prompt costs is counted in tokens at the beginning of a prompt; one behind a context costs more (see
`CoreLimits.prompt_cost`). The number of tokens never grows beyond what a step may have, which the worker's memory is
laid out for.

It owns numbers only, and must never read a clock: times are the worker's own.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_COST = 64
"""What costs less reads all weights for so little that prompts take several times as long."""

_AIM = 0.6  # of the limit
_MOST_SMALLER = 3
_LONGER_WEIGHT = 0.5
_SHORTER_WEIGHT = 0.2
_MOST_LONGER = 4.0  # a step that stood still says nothing about the next ones


@dataclass(slots=True)
class PromptBudget:
    """What a step has left for prompts: so many tokens, and what they may cost."""

    tokens: int
    cost: int

    def __bool__(self) -> bool:
        return self.tokens > 0 and self.cost > 0

    @property
    def most_at_beginning(self) -> int:
        """Tokens that fit at the beginning of a prompt."""
        return min(self.tokens, self.cost)


class ChunkPace:
    """The pace of one worker.

    Args:
        chunk_tokens: tokens of the measured chunk, at the beginning of a prompt.
        chunk_us: microseconds that it took.
        limit_us: microseconds that a chunk may take beyond what the decodes of its step do; 0: chunks are as set.
    """

    def __init__(self, chunk_tokens: int, chunk_us: float, limit_us: float) -> None:
        self._limit_us = limit_us
        self._least = max(LEAST_COST, chunk_tokens // _MOST_SMALLER)
        self._token_us = chunk_us / max(chunk_tokens, 1)
        self._decode_us = 0.0  # of the last step without prompt tokens
        self._num_decodes = 1

    def budget(self, most: int, num_decodes: int) -> PromptBudget:
        """What fits into a step of at most so many prompt tokens, beside so many decodes."""
        if not self._limit_us:
            return PromptBudget(most, most)
        fitting = self._limit_us / max(self._token_us, 1e-6)
        cost = max(self._least, round(_AIM * fitting)) if num_decodes else max(most, int(fitting))
        return PromptBudget(most, cost)

    def on_step(self, step_us: int, num_decodes: int, prompt_cost: int) -> None:
        """A step has ended.

        Args:
            step_us: what it took, by the worker's clock.
            num_decodes: tokens that were no prompt's.
            prompt_cost: what the others cost.
        """
        if not prompt_cost:
            self._decode_us, self._num_decodes = float(step_us), max(num_decodes, 1)
        elif self._limit_us and prompt_cost >= LEAST_COST:  # in a smaller one the rest of a step prevails
            decode_us = self._decode_us * min(1.0, num_decodes / self._num_decodes)
            seen_us = max(step_us - decode_us, 0.5 * step_us) / prompt_cost
            difference = min(seen_us, _MOST_LONGER * self._token_us) - self._token_us
            self._token_us += (_LONGER_WEIGHT if difference > 0 else _SHORTER_WEIGHT) * difference
