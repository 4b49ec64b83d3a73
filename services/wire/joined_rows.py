"""Several messages of rows as one: their columns end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any, TypeVar

from services.wire.answers import TextChunks, TokensProduced

R = TypeVar("R", TextChunks, TokensProduced)


def joined_rows(parts: Sequence[R]) -> R:
    """One message with the rows of all (at least one); where some have log-probabilities, the others' ids have none."""
    first = parts[0]
    if len(parts) == 1:
        return first
    columns: dict[str, Any] = {}
    for column in fields(first):
        values = [getattr(part, column.name) for part in parts]
        is_bytes = isinstance(values[0], bytes)
        columns[column.name] = b"".join(values) if is_bytes else tuple(chain.from_iterable(values))
    if columns["logprob_counts"]:
        counts = [part.logprob_counts or bytes(len(part.token_ids)) for part in parts]
        columns["logprob_counts"] = b"".join(counts)
    return replace(first, **columns)
