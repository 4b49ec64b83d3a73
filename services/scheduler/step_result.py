"""scheduler: the columns of a `StepResult`, read row by row."""

from __future__ import annotations

from typing import NamedTuple

from services.wire.columns import split_by_counts, unpack_int32, unpack_request_ids
from services.wire.errors import ProtocolError
from services.wire.messages import Finish, StepResult


class ResultError(Exception):
    """A result that is not the one awaited, or does not hold together: this worker cannot be trusted."""


class RowResult(NamedTuple):
    """What one row gave: ids from output index `first_index` on, or why it failed."""

    request_id: bytes
    attempt: int
    first_index: int
    token_ids: list[int]
    finish: Finish


def rows_of(result: StepResult) -> dict[int, RowResult]:
    """The rows of a result by their row number.

    Raises:
        ResultError: the counts do not add up, a row comes twice, or a finish is none of ours.
    """
    rows = unpack_int32(result.rows)
    try:
        columns = map(
            RowResult,
            unpack_request_ids(result.request_ids),
            unpack_int32(result.attempts),
            unpack_int32(result.first_indexes),
            split_by_counts(unpack_int32(result.token_ids), unpack_int32(result.counts)),
            map(_FINISHES.__getitem__, result.finishes),
        )
        by_row = dict(zip(rows, columns, strict=True))
    except (ProtocolError, KeyError) as error:
        raise ResultError(f"result of step {result.step}: {error}") from error
    if len(by_row) != len(rows):
        raise ResultError(f"result of step {result.step} names a row twice")
    return by_row


_FINISHES = {finish.value: finish for finish in Finish}
