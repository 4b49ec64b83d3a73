"""Tokenizer process: columns of log-probabilities, as they travel, cut into one entry for each token. Pure."""

from __future__ import annotations

from services.tokenizer.answer_parts import TokenLogprobs
from services.wire.columns import unpack_float32, unpack_int32


def token_logprobs(counts: bytes, token_ids: bytes, logprobs: bytes) -> list[TokenLogprobs | None]:
    """Cuts columns whose lengths the wire has checked.

    Args:
        counts: For each token how many entries are its own; 0 for one that asked for none.
        token_ids: The entries' ids: first the token's own, then the likeliest, best first.
        logprobs: Their values.

    Returns:
        One for each count; None where it is 0.
    """
    ids, values = unpack_int32(token_ids), unpack_float32(logprobs)
    found: list[TokenLogprobs | None] = []
    start = 0
    for count in unpack_int32(counts):
        end = start + count
        top = tuple(zip(ids[start + 1 : end], values[start + 1 : end], strict=True))
        found.append(TokenLogprobs(ids[start], values[start], top) if count else None)
        start = end
    return found
