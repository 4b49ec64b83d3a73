"""scheduler: the columns of a `StepResult`, read row by row, and whether a row can be what its request awaits."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from services.scheduler.request import Request
from services.wire.columns import REQUEST_ID_BYTES, split_by_counts, unpack_int32, unpack_request_ids
from services.wire.errors import ProtocolError
from services.wire.finish import Finish
from services.wire.logprob_columns import LogprobRun, runs_of_rows
from services.wire.steps import StepResult


class ResultError(Exception):
    """A result that is not the one awaited, or does not hold together: this worker cannot be trusted."""


# What one row gave: request id, attempt, index of the first output id, the ids, NONE or why the row failed, and the
# log-probabilities of the ids (None when no row of the result has any). A plain tuple: one is made for each token.
RowResult: TypeAlias = tuple[bytes, int, int, list[int], Finish, LogprobRun | None]


def rows_of(result: StepResult, first: int = 0) -> dict[int, RowResult]:
    """The rows of a result by their row number.

    Args:
        result: what the worker says.
        first: where to begin; each row before has exactly one id and no log-probabilities.

    Raises:
        ResultError: the counts do not add up, a row comes twice, or a finish is none of ours.
    """
    if first:
        result = _from(result, first)
    rows = unpack_int32(result.rows)
    try:
        counts = unpack_int32(result.counts)
        columns = zip(
            unpack_request_ids(result.request_ids),
            unpack_int32(result.attempts),
            unpack_int32(result.first_indexes),
            split_by_counts(unpack_int32(result.token_ids), counts),
            map(_FINISHES.__getitem__, result.finishes),
            runs_of_rows(result, counts),
            strict=True,
        )
        by_row = dict(zip(rows, columns, strict=True))
    except (ProtocolError, KeyError) as error:
        raise ResultError(f"result of step {result.step}: {error}") from error
    if len(by_row) != len(rows):
        raise ResultError(f"result of step {result.step} names a row twice")
    return by_row


def _from(result: StepResult, first: int) -> StepResult:
    return replace(
        result,
        rows=result.rows[4 * first :],
        request_ids=result.request_ids[REQUEST_ID_BYTES * first :],
        attempts=result.attempts[4 * first :],
        first_indexes=result.first_indexes[4 * first :],
        counts=result.counts[4 * first :],
        token_ids=result.token_ids[4 * first :],
        finishes=result.finishes[first:],
        logprob_counts=result.logprob_counts[4 * first :],
    )


def problem_of(request: Request, row_result: RowResult | None, end: int, logits_width: int) -> Finish:
    """Why this row fails alone: what the worker said, or an answer that cannot be this request's.

    Args:
        request: the one whose row it is.
        row_result: what the worker said of it; None when nothing.
        end: tokens that the plan had computed, which let the row sample after the last of them. When an earlier result
            brought several ids, the token there may be known by now: then the plan gives none.
        logits_width: ids that the worker can produce are [0, logits_width).
    """
    is_known = end < request.num_tokens
    if row_result is None:
        return Finish.NONE if is_known else Finish.INTERNAL_ERROR
    request_id, attempt, first_index, token_ids, finish, logprobs = row_result
    if finish:
        return finish
    submit = request.submit
    if is_known or not token_ids:
        fits = is_known and not token_ids
    else:
        fits = (
            first_index == request.num_output
            and request_id == submit.request_id
            and attempt == submit.attempt
            and max(token_ids) < logits_width
            and (not request.num_proposed or len(token_ids) <= request.num_proposed + 1)
            and (request.logprobs is None or _has_entries(logprobs))
            and (request.prompt is None or request.prompt.is_complete)
            and not request.prompt_end
        )
    return Finish.NONE if fits else Finish.INTERNAL_ERROR


def _has_entries(logprobs: LogprobRun | None) -> bool:
    """Whether every id has log-probabilities: a client that asked must not get an answer with holes."""
    return logprobs is not None and all(logprobs.counts)


_FINISHES = {finish.value: finish for finish in Finish}
