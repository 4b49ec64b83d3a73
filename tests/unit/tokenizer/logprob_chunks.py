"""Log-probabilities as they travel, for tests that play the other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.wire.answers import TextChunks
from services.wire.columns import pack_float32, pack_int32
from services.wire.requests import Submit
from services.wire.steps import PromptLogprobs

Entries = Sequence[tuple[int, float]]
"""Of one token: itself first, then the likeliest, best first."""


def with_logprobs(chunks: TextChunks, tokens: Sequence[Entries]) -> TextChunks:
    """The same batch with entries for each of its ids."""
    return replace(
        chunks,
        logprob_counts=pack_int32([len(entries) for entries in tokens]),
        logprob_ids=pack_int32([token_id for entries in tokens for token_id, _ in entries]),
        logprobs=pack_float32([value for entries in tokens for _, value in entries]),
    )


def prompt_logprobs(submit: Submit, first_position: int, tokens: Sequence[Entries], attempt: int = 0) -> PromptLogprobs:
    """A piece of a prompt's log-probabilities."""
    return PromptLogprobs(
        submit.request_id,
        attempt,
        first_position,
        pack_int32([len(entries) for entries in tokens]),
        pack_int32([token_id for entries in tokens for token_id, _ in entries]),
        pack_float32([value for entries in tokens for _, value in entries]),
    )
