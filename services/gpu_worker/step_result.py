"""gpu_worker: what a step gave, as the columns of its result. Pure: everything lies on the host.

A row that fails gives its reason and nothing else. One that was asked for a token gives it and the ids that must follow
it, or none where the plan did not know how many tokens the row has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.gpu_worker.pooling import embeddings
from services.gpu_worker.prepared_step import StepRows
from services.gpu_worker.prompt_logprobs import prompt_pieces
from services.gpu_worker.row_lines import Picks
from services.gpu_worker.step_work import StepOutput
from services.gpu_worker.uploads import Int64s
from services.wire.columns import pack_int32
from services.wire.finish import Finish
from services.wire.steps import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of the forward pass and of the whole step."""

    forward_us: int
    step_us: int


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that has run.

    Attributes:
        rows: its rows.
        picks: those that picked a token.
        output: what came of it, on the host.
        finishes: [num_rows] NONE, or why a row failed.
        forced: by place, ids that follow the one picked.
    """

    rows: StepRows
    picks: Picks
    output: StepOutput
    finishes: Int64s
    forced: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class _LogprobColumns:
    counts: bytes = b""
    token_ids: bytes = b""
    values: bytes = b""


def find_finishes(rows: StepRows, output: StepOutput, faults: Int64s) -> Int64s:
    """For each row NONE, or why it failed; `faults` [num_rows]: NONE, or why it could not be computed."""
    finishes = np.where(output.tokens.is_failed.numpy(), np.int64(Finish.NUMERICAL_ERROR), np.int64(Finish.NONE))
    finishes = np.where(faults != Finish.NONE, faults, finishes)
    return np.where(rows.is_refused, np.int64(Finish.INTERNAL_ERROR), finishes)


def empty_result(plan: StepPlan, times: StepTimes) -> StepResult:
    """Of a plan that runs nothing."""
    return StepResult(plan.epoch, plan.step, b"", b"", b"", b"", b"", b"", b"", times.forward_us, times.step_us)


def step_result(plan: StepPlan, step: FinishedStep, times: StepTimes) -> StepResult:
    """The message."""
    rows, finishes = step.rows, step.finishes
    has_failed = finishes != Finish.NONE
    gives = np.zeros(len(finishes), dtype=np.int64)
    gives[step.picks.places] = 1
    gives[has_failed] = 0
    token_ids = step.output.tokens.token_ids.numpy()[gives > 0]
    logprobs = _logprob_columns(step, gives)
    if step.forced:
        givers = np.flatnonzero(gives)
        followers = [step.forced.get(place, []) for place in givers.tolist()]
        gives[givers] += [len(ids) for ids in followers]
        token_ids = np.array(
            [each for own, ids in zip(token_ids.tolist(), followers, strict=True) for each in (own, *ids)]
        )
    is_named = rows.samples | has_failed
    failed = has_failed.tolist()
    return StepResult(
        epoch=plan.epoch,
        step=plan.step,
        rows=pack_int32(rows.rows[is_named].tolist()),
        request_ids=b"".join(rows.request_ids[place] for place in np.flatnonzero(is_named)),
        attempts=pack_int32(rows.attempts[is_named].tolist()),
        first_indexes=pack_int32(rows.first_indexes[is_named].tolist()),
        counts=pack_int32(gives[is_named].tolist()),
        token_ids=pack_int32(token_ids.tolist()),
        finishes=finishes[is_named].astype(np.uint8).tobytes(),
        forward_us=times.forward_us,
        step_us=times.step_us,
        logprob_counts=logprobs.counts,
        logprob_ids=logprobs.token_ids,
        logprobs=logprobs.values,
        prompt_logprobs=tuple(piece for part in step.output.prompts for piece in prompt_pieces(part, rows, failed)),
        embeddings=tuple(each for part in step.output.pooled for each in embeddings(part, rows, failed)),
    )


def _logprob_columns(step: FinishedStep, gives: Int64s) -> _LogprobColumns:
    """The log-probabilities of picked tokens; ids that follow one have none."""
    if not step.output.logprobs:
        return _LogprobColumns()
    width = 1 + max(part.top.ids.shape[1] for part in step.output.logprobs)
    counts = np.zeros(len(gives), dtype=np.int64)
    ids = np.zeros((len(gives), width), dtype="<i4")
    values = np.zeros((len(gives), width), dtype="<f4")
    for part in step.output.logprobs:
        num_top = part.top.ids.shape[1]
        counts[part.places] = 1 + np.minimum(part.num_top, num_top)
        ids[part.places, 0] = step.output.tokens.token_ids.numpy()[part.places]
        values[part.places, 0] = part.top.own.numpy()
        ids[part.places, 1 : 1 + num_top] = part.top.ids.numpy()
        values[part.places, 1 : 1 + num_top] = part.top.values.numpy()
    counts[gives == 0] = 0
    is_given = np.arange(width) < counts[:, None]
    by_id: list[int] = []
    for place in np.flatnonzero(gives).tolist():
        by_id += [int(counts[place]), *[0] * len(step.forced.get(place, ()))]
    return _LogprobColumns(pack_int32(by_id), ids[is_given].tobytes(), values[is_given].tobytes())
