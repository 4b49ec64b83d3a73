"""gpu_worker: one plan, from its arrival to its result: lay out, forward, masks, sample, copy back.

On a CPU a step has run when `launch` returns. On a CUDA device everything is only put in the device's queue; the result
is copied to page-locked memory behind it, and whoever wants it waits for that copy alone.

A step with grammars needs the tokens before it on the host to know its masks. Where they are (the step before is
finished), the masks are begun before the forward pass; else it is launched first, and the tokens are waited for while
it runs.

It owns no request state (that is `worker_state`) and must never send anything.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.grammar_seam import MaskJob
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.prepared_step import PreparedStep, StepRows
from services.gpu_worker.proposals import Proposals
from services.gpu_worker.row_lines import Picks
from services.gpu_worker.sampler import SampledTokens
from services.gpu_worker.step_result import FinishedStep, StepTimes, empty_result, find_finishes, step_result
from services.gpu_worker.step_times import StepClock
from services.gpu_worker.step_work import StepMasks, StepOutput
from services.gpu_worker.uploads import Int64s, upload
from services.gpu_worker.worker_state import WorkerState
from services.runtime.logs import about
from services.runtime.service import GroupLostError
from services.wire.finish import Finish
from services.wire.steps import StepPlan, StepResult

_Result = TypeVar("_Result")
_NONE = int(Finish.NONE)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step that runs something: its rows, those that pick, its output (on the host once it is done), and
    [num_rows] NONE, or why a row could not be computed. `forced` is filled when the grammars know what came of it, and
    with proposals that stand.
    """

    rows: StepRows
    picks: Picks
    output: StepOutput
    faults: Int64s
    proposals: Proposals | None
    forced: dict[int, list[int]] = field(default_factory=dict)

    def finishes(self) -> list[int]:
        """For each row NONE, or why it failed; once it is done."""
        return find_finishes(self.rows, self.output, self.faults)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step.

    Attributes:
        plan: what it runs.
        step: None when the plan runs nothing.
        clock: when it began, when it is done.
    """

    plan: StepPlan
    step: StepInFlight | None
    clock: StepClock

    def is_copied(self) -> bool:
        """Whether the result is on the host."""
        return self.clock.is_done()

    def wait_copied(self) -> None:
        """Waits until the result is on the host; a device error that the step met is raised here."""
        self.clock.wait_done()


@dataclass(frozen=True, slots=True)
class _Turn:
    """Who picks in a step; the rows among them that have a grammar, and their masks in the making."""

    picks: Picks
    begun: tuple[Picks, MaskJob] | None


@dataclass(frozen=True, slots=True)
class _Masks:
    """The masks of a step: `masked` are the rows that have one."""

    masked: Picks
    bits: Tensor

    def of(self, masked: Picks) -> StepMasks:
        """Those of some of the rows."""
        index = np.flatnonzero(np.isin(self.masked.places, masked.places))
        device = self.bits.device
        return StepMasks(upload(masked.logit_rows, device), self.bits.index_select(0, upload(index, device)))


class StepLauncher:
    """Runs plans in order on one model."""

    def __init__(self, runner: ModelRunner, state: WorkerState) -> None:
        self._runner = runner
        self._state = state
        self._device = runner.kv_cache.keys.device
        self._untold: deque[tuple[StepInFlight, StepClock]] = deque()
        """Steps with grammars that have not been told what came of them."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts a step.

        When memory runs out, or on a CPU when anything else is raised, the rows are run one by one and those that raise
        again fail: the others notice nothing. Any other error leaves a CUDA device unusable, so it is raised.

        Raises:
            PlanError: the plan does not fit what is held here.
            GroupLostError: other ranks that share the model are gone.
        """
        clock = StepClock(self._device)
        step = self._state.prepare(plan)
        if step is None:
            clock.stop()
            return PendingStep(plan, None, clock)
        if step.pages_to_clear:
            self._runner.zero_pages(step.pages_to_clear)
        in_flight = self._compute(plan, step, clock)
        clock.stop()
        if step.has_grammar:
            self._untold.append((in_flight, clock))
        return PendingStep(plan, in_flight, clock)

    def finish(self, pending: PendingStep) -> StepResult:
        """The result of a step whose output is on the host; steps are finished in order."""
        step = pending.step
        if step is None:
            return empty_result(pending.plan, StepTimes(0, pending.clock.step_us()))
        if self._untold and self._untold[0][0] is step:
            self._tell_grammars(*self._untold.popleft())
        if step.proposals is not None:
            self._verify(step, step.proposals)
        finishes = step.finishes()
        self._state.note_failures(step.rows, finishes)
        return step_result(
            pending.plan,
            FinishedStep(step.rows, step.picks, step.output, finishes, step.forced),
            StepTimes(pending.clock.forward_us(), pending.clock.step_us()),
        )

    def _compute(self, plan: StepPlan, step: PreparedStep, clock: StepClock) -> StepInFlight:
        faults = np.zeros(len(step.rows.rows), dtype=np.int64)  # Finish.NONE
        turn = None if self._untold and step.has_grammar else self._begin_turn(step)
        what = f"step {plan.step} of {len(faults)} rows"
        passed = self._attempt(lambda: self._forward(step, clock), what)
        turn = turn or self._begin_turn(step)
        masks = self._wait_for_masks(turn, faults)
        of_all = None if masks is None else masks.of(masks.masked)
        work = self._state.options.work(turn.picks, step.spans, of_all, step.proposals)
        output = None
        if passed is not None:
            hidden, logits = passed
            output = self._attempt(lambda: self._state.options.run(work, self._runner, hidden, logits), what)
        if output is None:
            output = self._run_one_by_one(step, turn.picks, masks, faults, clock)
        self._state.keep(work, output)
        return StepInFlight(step.rows, turn.picks, output.to_host(), faults, step.proposals)

    @torch.inference_mode()
    def _verify(self, step: StepInFlight, proposals: Proposals) -> None:
        """Gives rows the proposals that stand; clears what a rejected one may have left that is not finite."""
        verified = self._state.verify(step.rows, proposals, step.output)
        step.forced.update(verified.followers)
        if verified.spoiled_slots:
            self._runner.zero_slots(verified.spoiled_slots)

    def _forward(self, step: PreparedStep, clock: StepClock) -> tuple[Tensor, Tensor]:
        """Hidden states of all tokens, logits of each row's last own one, and of proposals behind them."""
        clock.begin_forward()
        hidden, normed = self._runner.states(step.inputs)
        logits = self._runner.logits(normed)
        clock.end_forward()
        return hidden, logits

    def _run_one_by_one(
        self, step: PreparedStep, picks: Picks, masks: _Masks | None, faults: Int64s, clock: StepClock
    ) -> StepOutput:
        """Each row by itself, without its proposals; marks those that raise again."""
        if len(faults) == 1 and step.proposals is None:
            faults[0] = Finish.INTERNAL_ERROR
            return StepOutput(_no_token(self._device))
        parts = []
        for place in range(len(faults)):
            one = functools.partial(self._run_alone, step.alone(place), picks.alone(place), masks, clock)
            part = self._attempt(one, "a row alone", step.rows.request_ids[place])
            if part is None:
                faults[place] = Finish.INTERNAL_ERROR
            parts.append(part or StepOutput(_no_token(self._device)))
        return StepOutput.joined(parts)

    def _run_alone(self, step: PreparedStep, picks: Picks, masks: _Masks | None, clock: StepClock) -> StepOutput:
        hidden, logits = self._forward(step, clock)
        is_masked = masks is not None and bool(np.isin(picks.places, masks.masked.places).any())
        work = self._state.options.work(picks, step.spans, masks.of(picks) if masks is not None and is_masked else None)
        return self._state.options.run(work, self._runner, hidden, logits)

    def _attempt(self, run: Callable[[], _Result], what: str, request_id: bytes = b"") -> _Result | None:
        """What it gives, or None when it raised; an error after which device or ranks cannot go on is raised."""
        try:
            return run()
        except GroupLostError:
            raise
        except Exception as error:
            if self._device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
                raise
            logger.exception("%s failed", what, extra=about(request_id))
            return None

    # ------------------------------------------------------------ grammars

    def _begin_turn(self, step: PreparedStep) -> _Turn:
        """Decides who picks; with grammars, once these know what the steps before gave."""
        if not step.has_grammar:
            return _Turn(self._state.pick(step), None)
        while self._untold:
            self._tell_grammars(*self._untold.popleft())
        picks = self._state.pick(step)
        return _Turn(picks, self._state.begin_masks(picks))

    def _wait_for_masks(self, turn: _Turn, faults: Int64s) -> _Masks | None:
        """The masks on the device; marks rows whose grammar has failed."""
        if turn.begun is None:
            return None
        masked, job = turn.begun
        made = job.wait()
        faults[masked.places] = made.finishes
        return _Masks(masked, upload(made.bits, self._device))

    def _tell_grammars(self, step: StepInFlight, clock: StepClock) -> None:
        """Waits for a step, and tells the grammars what its rows got."""
        clock.wait_done()
        given = step.picks.select(np.array(step.finishes())[step.picks.places] == _NONE)
        token_ids = step.output.tokens.token_ids.numpy()[given.places]
        step.forced.update(self._state.advance(step.rows, given, token_ids))


def _no_token(device: torch.device) -> SampledTokens:
    """What a row gives that could not be computed."""
    return SampledTokens(
        torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.bool, device=device)
    )
