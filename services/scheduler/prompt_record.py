"""scheduler: what became known of a prompt, for a request that asked for more than tokens.

Log-probabilities of prompt tokens come chunk by chunk, positions in order; an embedding comes once, with the last
chunk. Both are kept until the request is forgotten, so that they can be sent again. Only a request that asked has such
a record. What a value means is nobody's business here.

    positions   1        logprobs_from      next_position          num_prompt
                |  not wanted  |  pieces have come  |  still wanted   |
    position p needs the logits of token p - 1: the prefix cache may lend [0, next_position - 1)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from services.wire.columns import unpack_int32
from services.wire.request_params import NO_LOGPROBS, PLAIN_PROMPT, PromptParams, Task
from services.wire.steps import Embedding, PromptLogprobs

PromptPart: TypeAlias = PromptLogprobs | Embedding


class PromptRecord:
    """The parts that have come, and what is still wanted.

    Args:
        wish: what the client asked for; not `PLAIN_PROMPT`.
        num_prompt: tokens of the prompt, >= 1.
    """

    __slots__ = ("_num_prompt", "_wish", "next_position", "parts")

    def __init__(self, wish: PromptParams, num_prompt: int) -> None:
        self._wish = wish
        self._num_prompt = num_prompt
        asks_logprobs = wish.num_logprobs != NO_LOGPROBS
        self.next_position = max(wish.logprobs_from, 1) if asks_logprobs else num_prompt
        self.parts: list[PromptPart] = []

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are still to come."""
        return self.next_position < self._num_prompt

    @property
    def wants_embedding(self) -> bool:
        """Whether a pooled state is still to come."""
        asks = self._wish.task is not Task.GENERATE
        return asks and not any(isinstance(part, Embedding) for part in self.parts)

    @property
    def is_complete(self) -> bool:
        """Whether all that was asked for has come."""
        return not self.wants_logprobs and not self.wants_embedding

    @property
    def most_cached(self) -> int:
        """Tokens that the prefix cache may lend: what is still wanted must be computed by this request itself."""
        if self._wish.task is Task.EMBED_MEAN and self.wants_embedding:
            return 0
        return self.next_position - 1 if self.wants_logprobs else self._num_prompt

    def still_wanted(self) -> PromptParams:
        """What a worker that takes the request up now must tell."""
        if self.is_complete:
            return PLAIN_PROMPT
        num_logprobs = self._wish.num_logprobs if self.wants_logprobs else NO_LOGPROBS
        return replace(self._wish, num_logprobs=num_logprobs, logprobs_from=min(self.next_position, self._num_prompt))

    def take(self, part: PromptPart) -> bool:
        """Keeps a part; False when it is not the next one wanted: then the record stays incomplete."""
        if isinstance(part, Embedding):
            fits = self.wants_embedding and len(part.values) > 0
        else:
            counts = unpack_int32(part.counts)
            end = part.first_position + len(counts)
            fits = part.first_position == self.next_position < end <= self._num_prompt and all(counts)
            self.next_position = end if fits else self.next_position
        if fits:
            self.parts.append(part)
        return fits

    def adopt(self, other: PromptRecord, request_id: bytes, attempt: int) -> list[PromptPart]:
        """Takes over what a sibling with the same prompt learned, if that is what is wanted here too.

        Returns:
            The parts, in the name of this request.
        """
        if self.parts or self._wish != other._wish or not other.is_complete:
            return []
        self.parts = [replace(part, request_id=request_id, attempt=attempt) for part in other.parts]
        self.next_position = other.next_position
        return self.parts
