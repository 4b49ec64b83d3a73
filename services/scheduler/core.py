"""scheduler: the core of one worker. Events in, plans and outcomes out.

It owns the queues, the page ledger and the rows of its worker. It must never touch a socket, a clock, text or a tensor:
what it does depends on the order of events alone, so a test can replay it.

    submit -> COMPILING | HELD | WAITING -> RUNNING <-> RETRACTED    plan_step: decodes first, then prefill chunks,
                              any of them -> FINISHED                then admissions, all within one token budget

Plans may be in flight while the next is made (`plans_ahead`; 0 is the reference). What a plan samples is counted as
expected and never known before its result; a page freed after plan k may be written by plan k + 1, because the worker
runs plans in order; a row that turns out finished has its later results dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from services.scheduler.admission import CoreLimits, check_fits
from services.scheduler.chunk_pace import ChunkPace, PromptBudget
from services.scheduler.core_counters import CoreCounters
from services.scheduler.kv_ledger import KvLedger
from services.scheduler.lockstep import Lockstep
from services.scheduler.outcomes import Produced, StepOutcome
from services.scheduler.policy import RemainderEstimate
from services.scheduler.prompt_parts import PromptParts
from services.scheduler.queues import RequestQueues
from services.scheduler.request import Request, RequestState
from services.scheduler.reservations import Reservations
from services.scheduler.rows import Rows
from services.scheduler.siblings import leader_of
from services.scheduler.speculation import Speculation
from services.scheduler.step_plan import FlightRow, StepDraft, StepInFlight, check_cursors
from services.scheduler.step_reading import read_result
from services.scheduler.step_result import ResultError, RowResult, problem_of
from services.wire.finish import Finish
from services.wire.requests import Submit
from services.wire.steps import CompileGrammar, GrammarCompiled, StepPlan, StepResult


class Core:
    """Schedules the requests of one worker.

    Args:
        limits: the worker's sizes and the operator's settings.
        epoch: the scheduler's, written into plans.
        in_lockstep: whether decodes go in lockstep; if not, all is done row by row, with the same outcome.
    """

    def __init__(self, limits: CoreLimits, epoch: int, in_lockstep: bool = True) -> None:
        self.limits = limits
        self.ledger = KvLedger(limits.num_pages, limits.page_size, limits.caches_prefixes)
        self.counters = CoreCounters()
        self.prompt_parts = PromptParts()
        self.reservations = Reservations(self.ledger, limits, RemainderEstimate())
        self._epoch = epoch
        self.queues = RequestQueues()
        self._rows = Rows(limits.max_rows)
        self._in_flight: deque[StepInFlight] = deque()
        self._started: list[Request] = []
        self._num_arrived = 0
        self._lockstep = Lockstep(limits.page_size, limits.max_rows, in_lockstep)
        self._is_stalled = False  # the last plan came out empty, and nothing has happened since
        self.speculation = Speculation(limits, self.ledger, self._lockstep, self.counters)
        self.pace = ChunkPace(limits.chunk_tokens, limits.chunk_us, limits.chunk_limit_us)

    # ------------------------------------------------------------ what the shell reads

    @property
    def num_waiting(self) -> int:
        """Requests that were never admitted."""
        return self.queues.num_not_admitted

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self.queues.running)

    @property
    def num_retracted(self) -> int:
        """Requests that lost their pages."""
        return len(self.queues.retracted)

    @property
    def num_in_flight(self) -> int:
        """Plans whose result has not come."""
        return len(self._in_flight)

    @property
    def num_tokens_of_last_plan(self) -> int:
        """Tokens that the newest plan in flight computes; 0 when none is."""
        return self._in_flight[-1].num_tokens if self._in_flight else 0

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self.queues.open)

    @property
    def num_free_rows(self) -> int:
        """Requests that could run beside those that do."""
        return self._rows.num_free

    @property
    def is_idle(self) -> bool:
        """Whether no request is open and no result outstanding."""
        return not self.queues.open and not self._in_flight

    @property
    def open_requests(self) -> list[Request]:
        """Every request that has not ended."""
        return list(self.queues.open.values())

    # ------------------------------------------------------------ events

    def submit(self, submit: Submit, lane: bytes = b"") -> Request:
        """Takes a request in, whose tokens go to `lane`. It may have ended already: look at `is_alive`.

        Raises:
            RequestRefusedError: it can never run here (the client's fault), or the queue is full.
            ValueError: a request of this id is open: the router's fault.
        """
        if submit.request_id in self.queues.open:
            raise ValueError(f"request {submit.request_id.hex()} is open already")
        max_length = check_fits(submit, self.limits, self.num_waiting, self._rows.num_free)
        request = Request(submit, max_length, self._num_arrived, lane)
        self._num_arrived += 1
        self._is_stalled = False
        request.finish = request.first_verdict()
        if request.finish:
            request.move_to(RequestState.FINISHED)
            return request
        self.queues.enter(request)
        if submit.sampling.grammar is None:
            self._queue_up(request)
        else:
            self.queues.compile_first(request)
        return request

    def grammar_asks(self) -> list[CompileGrammar]:
        """What the worker must be asked to compile since the last call."""
        return self.queues.compiling.drain()

    def grammar_compiled(self, message: GrammarCompiled) -> list[Request]:
        """The worker has compiled a grammar, or says why it cannot be used.

        Returns:
            Those who waited for it: now in the line, or ended. Nobody when all have ended meanwhile.
        """
        requests = self.queues.compiling.answered(message)
        for request in requests:
            if message.problem:
                self._finish(request, request.num_output, [], Finish.ABORTED)
            else:
                self._queue_up(request)
        self._is_stalled = False
        return requests

    def end(self, request: Request, finish: Finish) -> Produced | None:
        """Ends a request in any state (client gone, deadline, ...); None when it had ended before."""
        return self._finish(request, request.num_output, [], finish) if request.is_alive else None

    def stop_found(self, request: Request, end_index: int) -> bool:
        """A stop string was completed by the token before `end_index`: that is the end; later tokens are forgotten.

        Returns:
            False when it had ended before, or the index is not one of its tokens.
        """
        if not request.is_alive or not 0 < end_index <= request.num_output:
            return False
        self._finish(request, end_index, [], Finish.STOP_STRING)
        request.truncate_output(end_index)
        return True

    def apply_result(self, result: StepResult) -> list[Produced]:
        """Takes what a plan gave; see `take_result`. Tells it row by row: whoever got tokens or ended has an item."""
        requests = dict(self.queues.open)
        return list(self.take_result(result).spelled_out(requests))

    def take_result(self, result: StepResult) -> StepOutcome:
        """Takes what a plan gave. Results come in the order of plans.

        Raises:
            ResultError: it is not the result of the oldest plan in flight: the link to the worker lost or invented one.
        """
        if not self._in_flight or result.epoch != self._epoch or result.step != self._in_flight[0].step:
            raise ResultError(f"result of step {result.step} is not the one awaited")
        flight = self._in_flight[0]
        reading = read_result(flight, result, self.limits.logits_width)
        if result.prompt_logprobs or result.embeddings:
            self.prompt_parts.take([*result.prompt_logprobs, *result.embeddings], self.queues.open)
        self._is_stalled = False
        for request in flight.new_requests:
            if request.state is RequestState.RUNNING:
                request.usage.enter_row(self.counters)
        self.counters.count_step(result.forward_us, result.step_us, flight.num_tokens)
        self.pace.on_step(result.step_us, flight.num_tokens - flight.num_prompt_tokens, flight.prompt_cost)
        self.reservations.estimate.on_step()
        runs = reading.march_on(self._lockstep, self._in_flight)
        self._in_flight.popleft()
        self._lockstep.advance()
        self.counters.output_tokens += sum(map(len, runs))
        rows = self._take_rows(reading.rows, reading.by_row)
        self.speculation.look()
        return StepOutcome(rows, runs)

    def flush_cache(self) -> int:
        """Empties the prefix cache of what no running request needs; returns the pages freed."""
        self._is_stalled = False
        return self.ledger.flush()

    def check_invariants(self) -> None:
        """Recounts pages, queues, rows and cursors.

        Raises:
            LedgerError, QueueError, CursorError: something does not add up: a fault of the scheduler.
        """
        self.queues.check()
        running = list(self.queues.running.values())
        self.ledger.check(running)
        self._rows.check(request.row for request in running)
        self._lockstep.check(running)
        check_cursors(self.open_requests, self._in_flight, self.limits.page_size)

    # ------------------------------------------------------------ planning

    def take_started(self) -> list[Request]:
        """Who was part of a plan for the first time, since the last call."""
        started, self._started = self._started, []
        return started

    def can_plan(self) -> bool:
        """Whether `plan_step` is worth calling: a plan may go out, and something happened since the last empty one."""
        plans_ahead = 0 if self.speculation.must_wait else self.limits.plans_ahead
        may_go_out = not self._is_stalled and len(self._in_flight) <= plans_ahead
        return may_go_out and (bool(self.queues.running) or self.queues.num_plannable > 0 or self._owes_release)

    def plan_step(self) -> StepPlan | None:
        """The next plan; None when nothing can run before another event.

        When nothing runs any more, a last plan without rows tells the worker which rows it need not keep.
        """
        lockstep = self._lockstep
        self.speculation.watch(self.queues.running.values(), self._in_flight)
        decodes, prefills = lockstep.split(self.queues.running.values())
        last, full = lockstep.take_due()
        for request in last:
            lockstep.leave(request, self._in_flight)
        decodes += last
        appended = self.reservations.grow(full, decodes + prefills, self.queues.running.values(), self._retract)
        lockstep.schedule_again()
        draft = StepDraft(lockstep.clock.planned, lockstep.marches())
        for request in decodes:
            if request.state is RequestState.RUNNING:
                draft.add(request, 1)
        self.speculation.propose(draft, appended, self._in_flight)
        if prefills or self.queues.num_admissible:
            budget = self.pace.budget(self.limits.prefill_budget(draft.num_tokens), draft.num_tokens)
            for request in prefills:
                if request.state is RequestState.RUNNING and budget:
                    draft.add_chunk(request, budget, self.limits)
            self._admit(draft, budget)
        if not draft.num_tokens and not self._owes_release:
            self._is_stalled = True
            return None
        plan = draft.plan(self._epoch, self._rows.take_released(), appended)
        self._in_flight.append(draft.in_flight())
        lockstep.clock.planned += 1
        return plan

    @property
    def _owes_release(self) -> bool:
        return self._rows.has_released and not self.queues.running and not self._in_flight

    def _retract(self, request: Request) -> None:
        self._leave_row(request, is_sound=True)
        self.queues.move(request, RequestState.RETRACTED)
        self.reservations.estimate.on_retraction()
        request.usage.num_retractions += 1
        self.counters.retracted += 1

    # ------------------------------------------------------------ admission

    def _admit(self, draft: StepDraft, budget: PromptBudget) -> None:
        """Lets requests begin or resume while rows, tokens of the step and pages last."""
        if not (budget and self._rows.num_free and self.queues.num_admissible):
            return
        num_reserved = sum(map(self.reservations.expected_growth, self.queues.running.values()))
        while budget and self._rows.num_free and draft.has_room:
            request = self._next_to_admit()
            is_alone = not self.queues.running
            if request is None or not self.reservations.admit(request, budget.tokens, num_reserved, is_alone):
                break
            if request.state is RequestState.WAITING:
                self._count_admission(request)
            self.queues.move(request, RequestState.RUNNING)
            request.row = self._rows.take()
            draft.add_new_row(request)
            draft.add_chunk(request, budget, self.limits)
            num_reserved += self.reservations.expected_growth(request)
        if draft.new_requests:
            self.queues.waiting.count_pass()

    def _next_to_admit(self) -> Request | None:
        """Retracted requests resume before anything new; one with results in flight lets all wait for these."""
        if not self.queues.retracted:
            return self.queues.waiting.first(self.ledger.peek)
        request = min(self.queues.retracted.values(), key=lambda retracted: retracted.arrival)
        is_in_flight = bool(self._in_flight) and request.last_step >= self._in_flight[0].step
        return None if is_in_flight else request

    def _count_admission(self, request: Request) -> None:
        self._started.append(request)
        request.account.served_tokens += request.num_tokens - request.num_planned
        self.counters.count_admission(request.num_prompt, request.cached_tokens)

    def _queue_up(self, request: Request) -> None:
        first = self.queues.open.get(request.submit.group_id)
        self.prompt_parts.adopt(request, first)
        self.queues.queue_up(request, leader_of(request, first, self.ledger))

    # ------------------------------------------------------------ results and ends

    def _take_rows(self, rows: Iterable[FlightRow], by_row: dict[int, RowResult]) -> list[Produced]:
        outcomes = []
        for request, row, end, samples in rows:
            row_result = by_row.pop(row, None)
            if request.state is RequestState.FINISHED:
                self.counters.dropped_rows += row_result is not None
                continue
            if request.state is RequestState.RUNNING:
                request.num_computed = end
            if row_result is not None or samples:
                outcome = self._apply_row(request, row_result, end)
                if outcome is not None:
                    outcomes.append(outcome)
            elif request.prompt_end and end == request.compute_length:
                outcomes.append(self._end_with_prompt(request))
        self.counters.dropped_rows += len(by_row)  # rows that no plan asked for
        return outcomes

    def _apply_row(self, request: Request, row_result: RowResult | None, end: int) -> Produced | None:
        first_index = request.num_output
        problem = problem_of(request, row_result, end, self.limits.logits_width)
        if problem:
            self.counters.failed_rows += 1
            return self._finish(request, first_index, [], problem)
        if row_result is None or not row_result[3]:
            return None  # an earlier result brought several ids, the one that this plan would have sampled among them
        if request.in_lockstep and len(row_result[3]) > 1:
            self._lockstep.leave(request, self._in_flight)  # it has more than one token to go now
        token_ids, finish = request.extend(row_result[3])
        if request.num_proposed:
            self.speculation.settle(request, end, len(token_ids), len(row_result[3]))
        if request.logprobs is not None and row_result[5] is not None:
            request.logprobs.extend(row_result[5].cut(0, len(token_ids)))
        self.counters.output_tokens += len(token_ids)
        request.account.served_tokens += len(token_ids)
        if finish:
            return self._finish(request, first_index, token_ids, finish)
        if not request.is_published and request.state is RequestState.RUNNING:
            self.ledger.publish(request)
            request.is_published = True
            self._release_held(request)
        return Produced(request, first_index, token_ids, Finish.NONE)

    def _end_with_prompt(self, request: Request) -> Produced:
        """The last token of a request that produces nothing is computed: the end, if all that it asked for has come."""
        is_told = request.prompt is None or request.prompt.is_complete
        self.counters.failed_rows += not is_told
        return self._finish(request, request.num_output, [], request.prompt_end if is_told else Finish.INTERNAL_ERROR)

    def _release_held(self, leader: Request) -> None:
        for sibling in self.queues.held.waiting_for(leader):
            self.prompt_parts.adopt(sibling, leader)
        self.queues.release_held(leader)

    def _finish(self, request: Request, first_index: int, token_ids: list[int], finish: Finish) -> Produced:
        is_sound = finish not in (Finish.NUMERICAL_ERROR, Finish.INTERNAL_ERROR, Finish.GRAMMAR_TOO_LARGE)
        has_prompt = is_sound and request.num_computed >= request.num_prompt
        if request.state is RequestState.RUNNING:
            self._leave_row(request, is_sound)
        self.queues.move(request, RequestState.FINISHED)
        request.finish = finish
        self._is_stalled = False
        if has_prompt:
            self._release_held(request)
        else:
            self.queues.replace_leader(request)
        return Produced(request, first_index, token_ids, finish)

    def _leave_row(self, request: Request, is_sound: bool) -> None:
        if request.in_lockstep:
            self._lockstep.leave(request, self._in_flight)
        request.usage.leave_row(self.counters, len(request.pages))
        self.ledger.release(request, is_sound)
        request.is_published, request.proposer = False, None
        self._rows.give_back(request.row)
        request.row = -1
