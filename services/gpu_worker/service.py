"""Worker process: the loop that runs what the scheduler plans.

    plans = receive();  pending = launch(plan);  send(result of each pending step that is on the host)

One blocking poll loop. On a CPU a step has run when it is launched; its result goes out at once. On a CUDA device the
next plan is launched while the step before still runs; a thread wakes the loop when a result is on the host.

It owns the order of steps. It never decides what runs and never frees a page.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque

from services.gpu_worker.copy_watcher import CopyWatcher
from services.gpu_worker.host_limits import process_age_s
from services.gpu_worker.instruments import WorkerInstruments
from services.gpu_worker.parallel.following import follow
from services.gpu_worker.parallel.group import RankGroup, meet
from services.gpu_worker.plan_check import PlanError
from services.gpu_worker.process_set_up import set_up_process
from services.gpu_worker.scheduler_link import SchedulerLink, StopRequestedError
from services.gpu_worker.start_stages import StartStages
from services.gpu_worker.start_up import ReadyWorker, start_up
from services.gpu_worker.step_launcher import PendingStep
from services.runtime.rank_place import rank_place
from services.runtime.service import Process, StartError
from services.wire.members import State
from services.wire.steps import StepPlan

_QUIET_S = 0.3  # told to stop: no plan for so long means that nothing runs any more
_REJOIN_S = 0.5  # a socket tries to connect again every 0.1 s

logger = logging.getLogger(__name__)


class WorkerService:
    """The loop."""

    def __init__(self, process: Process, link: SchedulerLink, worker: ReadyWorker) -> None:
        self._process = process
        self._link = link
        self._worker = worker
        self._instruments = WorkerInstruments(worker, link, process.registry)
        self._watcher = CopyWatcher(link.interrupt)
        link.on_grammar = worker.grammars.compiler.submit
        worker.grammars.compiler.on_answer = link.interrupt
        self._plans: deque[StepPlan] = deque()
        self._pending: deque[PendingStep] = deque()
        self._epoch: int | None = None  # whose plans are run
        self._next_step = 0
        self._last_plan_s = 0.0
        self._drain_deadline_s: float | None = None
        self._alone_since_s: float | None = None  # told to stop: since when the scheduler is gone

    def serve(self) -> None:
        """Runs plans until told to stop and nothing is left to run.

        Raises:
            SchedulerLostError: the scheduler is silent or takes nothing.
            PlanError: a plan does not continue what this worker holds.
            RuntimeError: the device failed.
        """
        self._link.introduce(self._worker.card)
        while not self._is_done(time.monotonic()):
            for plan in self._link.receive(self._patience_s(time.monotonic())):
                self._accept(plan)
            for answer in self._worker.grammars.compiler.take_answers():
                self._link.send(answer)
            self._launch_next()
            self._send_finished()
            self._worker.roofline.log_news(time.monotonic())

    def _patience_s(self, now_s: float) -> float:
        """How long to wait for messages: not at all when there is something to do."""
        if self._plans:
            return 0.0
        return self._link.session.next_due_s(now_s) if self._drain_deadline_s is None else _QUIET_S

    def _accept(self, plan: StepPlan) -> None:
        """Takes the next step of the scheduler that runs now; drops what an older one sent, or what came before."""
        if plan.epoch != self._link.session.scheduler_epoch:
            self._link.refuse(f"step {plan.step} of another scheduler")
            return
        if plan.epoch != self._epoch:
            self._follow(plan.epoch)
        if plan.step < self._next_step:
            self._link.refuse(f"step {plan.step}, which has run already")
            return
        if plan.step > self._next_step:
            raise PlanError(f"step {plan.step} came instead of step {self._next_step}: a plan was lost")
        self._next_step += 1
        self._last_plan_s = time.monotonic()
        self._plans.append(plan)

    def _follow(self, epoch: int) -> None:
        """A scheduler that was started anew knows nothing of the rows held here."""
        if self._epoch is not None:
            logger.warning("a new scheduler plans from here on; %d rows are released", self._worker.state.num_held)
        self._plans.clear()
        self._worker.state.release_all()
        self._epoch, self._next_step = epoch, 0

    def _launch_next(self) -> None:
        if not self._plans:
            return
        pending = self._worker.launcher.launch(self._plans.popleft())
        self._pending.append(pending)
        if not pending.is_copied():
            self._watcher.watch(pending)

    def _send_finished(self) -> None:
        while self._pending and self._pending[0].is_copied():
            pending = self._pending.popleft()
            result = self._worker.launcher.finish(pending)
            self._link.send(result)
            self._link.session.progress += 1
            if pending.step is not None:  # else it only released rows: no forward pass
                self._instruments.count(pending.plan, result)

    def _is_done(self, now_s: float) -> bool:
        """Whether to leave: told to stop and done, as the scheduler knows; or that is gone, or time is over."""
        if not self._process.is_stopping:
            return False
        if self._drain_deadline_s is None:
            self._drain_deadline_s = now_s + self._process.drain_timeout_s
            self._last_plan_s = now_s
            self._link.session.set_state(State.DRAINING, now_s)
            logger.info("draining: %d rows are held", self._worker.state.num_held)
        if self._pending:
            return False
        session = self._link.session
        if now_s >= self._drain_deadline_s or not session.is_welcome or self._is_left(now_s):
            return True
        if self._plans or self._worker.state.num_held:
            return False
        if session.told_state is State.READY and session.scheduler_state is State.READY:
            return False  # it may not know yet, and send new rows
        return now_s - self._last_plan_s >= _QUIET_S

    def _is_left(self, now_s: float) -> bool:
        """Whether the scheduler has been gone for longer than a broken link takes to be made anew."""
        if not self._link.is_alone:
            self._alone_since_s = None
            return False
        self._alone_since_s = now_s if self._alone_since_s is None else self._alone_since_s
        return now_s - self._alone_since_s >= _REJOIN_S


def main(process: Process) -> None:
    """Loads the model while telling the scheduler so, then serves; or does what rank 0 of its group says."""
    stages = StartStages(process_age_s())
    group = _meet_others(process)
    if group is not None and not group.is_leading:
        follow(process, group)
        return
    link = SchedulerLink(process)
    is_friendly = False
    try:
        worker = start_up(process.settings, link.pump, group, stages)
        gc.collect()
        gc.freeze()  # the model lives as long as the process: no collection need look at it again
        try:
            WorkerService(process, link, worker).serve()
        finally:
            worker.grammars.close()
        is_friendly = True
    except StopRequestedError:
        is_friendly = True
    finally:
        link.close(is_friendly)
        if group is not None and is_friendly:
            group.close()


def _meet_others(process: Process) -> RankGroup | None:
    """The group that this process is one rank of, once all are here; None: it is alone.

    Raises:
        StartError: they do not come, or are not as many as was asked for.
    """
    settings, place = process.settings, rank_place()
    if place is None:
        if settings.tp_size > 1:
            raise StartError(
                f"--tp-size {settings.tp_size}: nobody has told this process its rank (torchrun does, with as many "
                "processes; tokenway serve starts them itself)"
            )
        return None
    if settings.tp_size not in (0, place.size):
        raise StartError(f"--tp-size {settings.tp_size}, but WORLD_SIZE is {place.size}")
    return meet(place, set_up_process(settings, place), process.ask_to_stop)
