"""scheduler: prompt-lookup speculation of one core: who proposes, how much, and when a plan must wait for a result.

A *watched* request is looked at whenever ids have come. If its newest ids came before in its prompt or answer, what
followed then is proposed: its next step computes these ids behind its own token, and the worker samples after each. Ids
that it sampled count, whatever was proposed; so a proposal changes how many come at once, and never which.

    known    ... a b c      plan: c and the proposals d e f     sampled after them:  d e x g
    result   d e x          f was proposed where x came: it is forgotten, its KV is overwritten

Proposals need the newest id, so no plan goes out ahead of results as long as a watched request has something to
propose; otherwise plans go ahead as ever. Owns who is watched. It never takes pages that somebody else could need, and
a step that is large already stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection

from services.scheduler.admission import CoreLimits
from services.scheduler.core_counters import CoreCounters
from services.scheduler.kv_ledger import KvLedger
from services.scheduler.lockstep import Lockstep
from services.scheduler.proposer import Proposer
from services.scheduler.request import Request, RequestState
from services.scheduler.step_plan import StepDraft, StepInFlight


class Speculation:
    """Proposals for the requests of one core.

    Args:
        limits: the core's; without limits for speculation nothing is watched, and all of this costs nothing.
        ledger: its pages.
        lockstep: where requests are while they rest; its clock counts the rests.
        counters: what is counted.
    """

    def __init__(self, limits: CoreLimits, ledger: KvLedger, lockstep: Lockstep, counters: CoreCounters) -> None:
        self.must_wait = False
        """Whether no plan may go out before all results have come."""
        self._limits = limits.speculation
        # A prompt that may not be cut must find its room in the step beside all running requests.
        self._most_tokens = limits.token_budget if limits.is_chunked else limits.max_rows
        self._ledger = ledger
        self._lockstep = lockstep
        self._counters = counters
        self._watched: list[Request] = []
        self._num_running = 0

    @property
    def num_watched(self) -> int:
        """Requests that are looked at: neither resting nor asking for what cannot be verified."""
        return sum(request.is_watched and request.state is RequestState.RUNNING for request in self._watched)

    def watch(self, running: Collection[Request], in_flight: Collection[StepInFlight]) -> None:
        """Decides who is looked at from the next step on, and takes them out of the lockstep."""
        limits = self._limits
        if limits is None:
            return
        for request in self._watched:
            request.is_watched = False
        self._watched, self._num_running = [], len(running)
        if len(running) > limits.most_rows:
            return
        step = self._lockstep.clock.planned
        for request in running:
            if not _can_be_verified(request):
                continue
            if request.proposer is None:
                if request.num_expected - request.num_planned > 1:
                    continue  # its prompt is still to be computed
                request.proposer = Proposer(limits)
            if step < request.proposer.rests_until:
                continue
            if request.in_lockstep:
                self._lockstep.leave(request, in_flight)
            request.is_watched = True
            self._watched.append(request)

    def propose(self, draft: StepDraft, appended: dict[int, list[int]], in_flight: Collection[StepInFlight]) -> None:
        """Adds proposals to the decodes of a step, unless results are outstanding: then newest ids are not known.

        Args:
            draft: the step, with its decodes and nothing else.
            appended: row -> pages that it gets with the plan; more may be added.
            in_flight: plans whose result has not come.
        """
        if in_flight or not self._watched or self._limits is None:
            return
        ready = [place for place, request in enumerate(draft.requests) if request.is_watched and self._finds(request)]
        most_tokens = min(self._limits.step_tokens, self._most_tokens)
        share = (most_tokens - draft.num_tokens) // max(len(ready), 1)
        for place in ready:
            request, proposer = draft.requests[place], draft.requests[place].proposer
            assert proposer is not None  # it is watched
            num_ids = self._with_pages(request, min(share, proposer.num_ids, _most_useful(request)), appended)
            if num_ids > 0:
                draft.propose(place, proposer.proposal(request.token_bytes, num_ids))
                self.must_wait = True

    def settle(self, request: Request, end: int, num_taken: int, num_ids: int) -> None:
        """The result of a step with proposals has come, and its ids are the request's.

        Args:
            request: whose.
            end: tokens computed without the proposals.
            num_taken: ids of the result that count; none comes behind the end of an answer.
            num_ids: ids of the result, >= 1.
        """
        num_proposed, num_accepted = request.num_proposed, num_ids - 1
        request.num_proposed = 0
        request.num_computed = request.num_planned = end + num_taken - 1
        request.usage.num_proposed += num_proposed
        request.usage.num_accepted += num_accepted
        self._counters.proposed_tokens += num_proposed
        self._counters.accepted_tokens += num_accepted
        if request.proposer is not None:
            request.proposer.learn(num_proposed, num_accepted, self._lockstep.clock.planned)

    def look(self) -> None:
        """A result was taken: whether the next plan has to wait for those still in flight."""
        self.must_wait = False
        for request in self._watched:
            num_unknown = request.num_expected - request.num_tokens
            if not num_unknown or request.state is not RequestState.RUNNING or request.proposer is None:
                continue
            if _most_useful(request) > num_unknown and request.proposer.find(request.token_bytes):
                self.must_wait = request.proposer.has_waited = True

    def _finds(self, request: Request) -> bool:
        """Whether it has something to propose, now that all its ids are known."""
        proposer = request.proposer
        assert proposer is not None  # it is watched
        is_found = _most_useful(request) > 0 and proposer.find(request.token_bytes)
        if proposer.has_waited and not is_found:
            proposer.note_vain_wait(self._lockstep.clock.planned)
        proposer.has_waited = False
        return is_found

    def _with_pages(self, request: Request, num_ids: int, appended: dict[int, list[int]]) -> int:
        """How many of the proposals have pages; more are taken only if every other running request could have one."""
        num_missing = self._ledger.pages_for(request.num_tokens + num_ids) - len(request.pages)
        if num_missing > 0 and self._ledger.num_available >= num_missing + self._num_running:
            appended.setdefault(request.row, []).extend(self._ledger.extend(request, num_missing) or ())
        return min(num_ids, len(request.pages) * self._ledger.page_size - request.num_tokens)


def _can_be_verified(request: Request) -> bool:
    """Whether the worker can sample after proposals: nothing but ids is wanted, and no rule depends on those before."""
    return request.is_plain and request.submit.sampling.rules is None


def _most_useful(request: Request) -> int:
    """Proposals that could all stand: the last token that it may produce comes behind them."""
    return request.compute_length - request.num_tokens
