"""Tokenizer process: what was asked of a prompt itself and comes beside its answer, chunk by chunk.

    log-probabilities   [first wanted ... next)   only what begins here or reaches beyond it is new
    embedding           comes whole

The answers of one prompt share its pieces: the first of them asks, and none of them ends before they are complete.
Pure: no clock, no socket.
"""

from __future__ import annotations

from services.tokenizer.answer_parts import TokenLogprobs
from services.tokenizer.token_logprobs import token_logprobs
from services.wire.columns import unpack_int32
from services.wire.errors import ProtocolError
from services.wire.request_params import NO_LOGPROBS, Task
from services.wire.requests import Submit
from services.wire.steps import Embedding, PromptLogprobs


class PieceGapError(Exception):
    """A piece does not begin where the last one ended: what lies between was lost and must come again."""


class PromptPieces:
    """The pieces of one prompt."""

    __slots__ = ("_awaits_embedding", "_end", "_next", "embedding", "logprobs", "request_id", "wants_logprobs")

    def __init__(self, submit: Submit) -> None:
        """Nothing has come; `submit` is that of the prompt's first answer."""
        asks = submit.prompt
        self.request_id = submit.request_id
        self.embedding = b""
        """Little-endian float32; empty until it is there."""
        self.logprobs: list[TokenLogprobs] = []
        """One for each position from the first wanted on; that of position 0 has no value."""
        self.wants_logprobs = asks.num_logprobs != NO_LOGPROBS
        self._awaits_embedding = asks.task is not Task.GENERATE
        self._next = max(1, asks.logprobs_from)
        self._end = self._next
        if self.wants_logprobs:
            self._end = max(self._next, len(submit.prompt_token_ids) // 4)
            if asks.logprobs_from <= 1:
                self.logprobs.append(TokenLogprobs(unpack_int32(submit.prompt_token_ids[:4])[0], None))

    @property
    def are_complete(self) -> bool:
        """Whether all that was asked for is there."""
        return self._next == self._end and not self._awaits_embedding

    def take_logprobs(self, message: PromptLogprobs) -> bool:
        """Takes what is new in a message; False when nothing is.

        Raises:
            PieceGapError: something before it is missing; nothing was taken.
            ProtocolError: it was not asked for; nothing was taken.
        """
        if message.first_position + len(message.counts) // 4 > self._end:
            raise ProtocolError("log-probabilities behind the end of a prompt")
        num_known = self._next - message.first_position
        if num_known < 0:
            raise PieceGapError
        found = token_logprobs(message.counts, message.token_ids, message.logprobs)[num_known:]
        new = [entry for entry in found if entry is not None]
        if len(new) != len(found):
            raise ProtocolError("a prompt's position without its log-probability")
        self.logprobs += new
        self._next += len(new)
        return bool(new)

    def take_embedding(self, message: Embedding) -> bool:
        """Takes the embedding; False when it was there or not asked for."""
        if not self._awaits_embedding:
            return False
        self.embedding = message.values
        self._awaits_embedding = False
        return True
