"""gpu_worker: what a step gave, as the columns of its result. Pure: everything lies on the host.

A row that fails gives its reason and nothing else. One that was asked for a token gives it and the ids that must follow
it, or none where the plan did not know how many tokens the row has.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

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

_NONE, _FAILED, _REFUSED = (int(finish) for finish in (Finish.NONE, Finish.NUMERICAL_ERROR, Finish.INTERNAL_ERROR))


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
        finishes: by row NONE, or why a row failed.
        forced: by place, ids that follow the one picked.
    """

    rows: StepRows
    picks: Picks
    output: StepOutput
    finishes: list[int]
    forced: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class _LogprobColumns:
    counts: bytes = b""
    token_ids: bytes = b""
    values: bytes = b""


def find_finishes(rows: StepRows, output: StepOutput, faults: Int64s) -> list[int]:
    """For each row NONE, or why it failed; `faults` [num_rows]: NONE, or why it could not be computed."""
    of_rows = zip(rows.is_refused, faults.tolist(), output.tokens.is_failed.tolist(), strict=True)
    return [
        _REFUSED if is_refused else fault if fault != _NONE else _FAILED if is_failed else _NONE
        for is_refused, fault, is_failed in of_rows
    ]


def empty_result(plan: StepPlan, times: StepTimes) -> StepResult:
    """Of a plan that runs nothing."""
    return StepResult(plan.epoch, plan.step, b"", b"", b"", b"", b"", b"", b"", times.forward_us, times.step_us)


def step_result(plan: StepPlan, step: FinishedStep, times: StepTimes) -> StepResult:
    """The message."""
    rows, finishes = step.rows, step.finishes
    failed = [finish != _NONE for finish in finishes]
    gives = [0] * len(finishes)
    for place in step.picks.places.tolist():
        gives[place] = int(not failed[place])
    token_ids = list(compress(step.output.tokens.token_ids.tolist(), gives))
    logprobs = _logprob_columns(step, gives)
    if step.forced:
        givers = [place for place, num_given in enumerate(gives) if num_given]
        followers = [step.forced.get(place, []) for place in givers]
        for place, ids in zip(givers, followers, strict=True):
            gives[place] += len(ids)
        token_ids = [each for own, ids in zip(token_ids, followers, strict=True) for each in (own, *ids)]
    is_named = [samples or has_failed for samples, has_failed in zip(rows.samples.tolist(), failed, strict=True)]
    return StepResult(
        epoch=plan.epoch,
        step=plan.step,
        rows=pack_int32(compress(rows.rows.tolist(), is_named)),
        request_ids=b"".join(compress(rows.request_ids, is_named)),
        attempts=pack_int32(compress(rows.attempts, is_named)),
        first_indexes=pack_int32(compress(rows.first_indexes.tolist(), is_named)),
        counts=pack_int32(compress(gives, is_named)),
        token_ids=pack_int32(token_ids),
        finishes=bytes(compress(finishes, is_named)),
        forward_us=times.forward_us,
        step_us=times.step_us,
        logprob_counts=logprobs.counts,
        logprob_ids=logprobs.token_ids,
        logprobs=logprobs.values,
        prompt_logprobs=tuple(piece for part in step.output.prompts for piece in prompt_pieces(part, rows, failed)),
        embeddings=tuple(each for part in step.output.pooled for each in embeddings(part, rows, failed)),
    )


def _logprob_columns(step: FinishedStep, gives: list[int]) -> _LogprobColumns:
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
    counts[np.array(gives) == 0] = 0
    is_given = np.arange(width) < counts[:, None]
    by_id: list[int] = []
    for place in np.flatnonzero(gives).tolist():
        by_id += [int(counts[place]), *[0] * len(step.forced.get(place, ()))]
    return _LogprobColumns(pack_int32(by_id), ids[is_given].tobytes(), values[is_given].tobytes())
