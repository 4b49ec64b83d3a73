"""gpu_worker: one plan, from its arrival to its result: lay out, forward, sample, copy back.

On a CPU a step has run when `launch` returns. On a CUDA device everything is only put in the device's queue; the result
is copied to page-locked memory behind it, and whoever wants it waits for that copy alone.

It owns no request state (that is `worker_state`) and must never send anything.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.prepared_step import Bools, PreparedStep, StepRows
from services.gpu_worker.sampler import SampledTokens, sample
from services.gpu_worker.step_times import StepClock
from services.gpu_worker.uploads import Int64s
from services.gpu_worker.worker_state import WorkerState
from services.wire.columns import pack_int32
from services.wire.messages import Finish, StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step.

    Attributes:
        plan: what it runs.
        rows: its rows; None when the plan runs nothing.
        tokens: of all rows; on the host once `clock` says that it is done.
        has_raised: [num_rows] the rows that could not be computed.
        clock: when it began, when it is done.
    """

    plan: StepPlan
    rows: StepRows | None
    tokens: SampledTokens
    has_raised: Bools
    clock: StepClock

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return int(np.frombuffer(self.plan.num_new_tokens, dtype="<i4").sum())

    def is_copied(self) -> bool:
        """Whether the result is on the host."""
        return self.clock.is_done()

    def wait_copied(self) -> None:
        """Waits until the result is on the host; a device error that the step met is raised here."""
        self.clock.wait_done()


class StepLauncher:
    """Runs plans in order on one model."""

    def __init__(self, runner: ModelRunner, state: WorkerState) -> None:
        self._runner = runner
        self._state = state
        self._device = runner.kv_cache.keys.device

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts a step.

        When memory runs out, or on a CPU when anything else is raised, the rows are run one by one and those that raise
        again fail: the others notice nothing. Any other error leaves a CUDA device unusable, so it is raised.

        Raises:
            PlanError: the plan does not fit what is held here.
        """
        clock = StepClock(self._device)
        step = self._state.prepare(plan)
        if step is None:
            clock.stop()
            return PendingStep(plan, None, _no_tokens(0, self._device), np.zeros(0, dtype=np.bool_), clock)
        if step.pages_to_clear:
            self._runner.kv_cache.zero_pages(step.pages_to_clear)
        has_raised = np.zeros(len(step.rows.rows), dtype=np.bool_)
        try:
            tokens = self._run(step, clock)
        except Exception as error:
            self._raise_if_lost(error)
            logger.exception("step %d of %d rows failed", plan.step, len(has_raised))
            tokens = self._run_one_by_one(step, clock, has_raised)
        self._state.keep_tokens(step, tokens.token_ids)
        on_host = SampledTokens(_to_host(tokens.token_ids), _to_host(tokens.is_failed))
        clock.stop()
        return PendingStep(plan, step.rows, on_host, has_raised, clock)

    def finish(self, pending: PendingStep) -> StepResult:
        """The result of a step whose tokens are on the host."""
        rows, plan = pending.rows, pending.plan
        if rows is None:
            return StepResult(plan.epoch, plan.step, b"", b"", b"", b"", b"", b"", b"", 0, pending.clock.step_us())
        finishes = _finishes(rows, pending)
        self._state.note_failures(rows, finishes == Finish.NUMERICAL_ERROR)
        is_named = rows.samples | (finishes != Finish.NONE)
        gives = (finishes == Finish.NONE)[is_named]
        token_ids = pending.tokens.token_ids.numpy()[is_named][gives].tolist()
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            rows=pack_int32(rows.rows[is_named].tolist()),
            request_ids=b"".join(rows.request_ids[place] for place in np.flatnonzero(is_named)),
            attempts=pack_int32(rows.attempts[is_named].tolist()),
            first_indexes=pack_int32(rows.first_indexes[is_named].tolist()),
            counts=pack_int32(gives.astype(np.int64).tolist()),
            token_ids=pack_int32(token_ids),
            finishes=finishes[is_named].astype(np.uint8).tobytes(),
            forward_us=pending.clock.forward_us(),
            step_us=pending.clock.step_us(),
        )

    def _run(self, step: PreparedStep, clock: StepClock) -> SampledTokens:
        clock.begin_forward()
        logits = self._runner.forward(step.inputs)
        clock.end_forward()
        return sample(logits, step.groups)

    def _run_one_by_one(self, step: PreparedStep, clock: StepClock, has_raised: Bools) -> SampledTokens:
        """Each row by itself; marks those that raise again."""
        if len(has_raised) == 1:
            has_raised[0] = True
            return _no_tokens(1, self._device)
        parts = []
        for place in range(len(has_raised)):
            try:
                parts.append(self._run(step.alone(place), clock))
            except Exception as error:
                self._raise_if_lost(error)
                logger.exception("request %s fails", step.rows.request_ids[place].hex())
                has_raised[place] = True
                parts.append(_no_tokens(1, self._device))
        return SampledTokens(
            torch.cat([part.token_ids for part in parts]), torch.cat([part.is_failed for part in parts])
        )

    def _raise_if_lost(self, error: Exception) -> None:
        """Raises an error after which the device cannot be used any more."""
        if self._device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
            raise error


def _finishes(rows: StepRows, pending: PendingStep) -> Int64s:
    """For each row NONE, or why it failed."""
    finishes = np.where(pending.tokens.is_failed.numpy(), np.int64(Finish.NUMERICAL_ERROR), np.int64(Finish.NONE))
    return np.where(rows.is_refused | pending.has_raised, np.int64(Finish.INTERNAL_ERROR), finishes)


def _no_tokens(num_rows: int, device: torch.device) -> SampledTokens:
    """What rows give that could not be computed."""
    return SampledTokens(
        torch.zeros(num_rows, dtype=torch.int64, device=device), torch.zeros(num_rows, dtype=torch.bool, device=device)
    )


def _to_host(tensor: Tensor) -> Tensor:
    """On the host, perhaps only once the device has come this far."""
    if tensor.is_cpu:
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)
