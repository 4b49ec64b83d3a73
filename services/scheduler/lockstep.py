"""scheduler: the decodes of a core that go in lockstep: one token each with every plan, and nothing done for each.

Most of what a busy core does is the same again: the rows of the last step, each one token further. So a request that
has nothing but one token to go joins; from then on its cursors follow from the clock (`request.StepClock`), its part of
plans and results is columns (`formation`), and it is looked at again only in the steps of a calendar: when its pages
are full, and before its last token. It leaves when anything else happens to it: a stop id, a retraction, an abort.
The core's rows one by one are the reference: a request that is not here gets the same tokens.

Owns who is in lockstep. It must never give out pages or end a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeAlias

from services.scheduler.formation import Formation, March
from services.scheduler.queues import QueueError
from services.scheduler.request import LOGGED_STEPS, Request, StepClock
from services.wire.columns import pack_int32

REST_STEPS = 32  # how long nobody joins after a result that was not one id for each

_Due: TypeAlias = tuple[Request, int, int]  # who, the step at which it joined, the step that has its last token


class MarchingStep(Protocol):
    """A step in flight, as far as the lockstep is concerned."""

    @property
    def step(self) -> int:
        """Its number."""

    @property
    def marches(self) -> Sequence[March]:
        """Its rows in lockstep."""


class Lockstep:
    """The formations of one core, one for each lane.

    Args:
        page_size: tokens of a page.
        max_rows: rows of the worker.
        is_open: whether anybody may join; if not, this is a clock.
    """

    def __init__(self, page_size: int, max_rows: int, is_open: bool = True) -> None:
        self.clock = StepClock(max_rows)
        self.num_requests = 0
        self.stop_ids: frozenset[int] = frozenset()
        """All ids that end one of the requests."""
        self._page_size = page_size
        self._is_open = is_open
        self._formations: dict[bytes, Formation] = {}
        self._full_at: dict[int, list[_Due]] = {}  # by step: whose pages are full
        self._last_at: dict[int, list[_Due]] = {}  # by step: who has its last token to go
        self._full: list[_Due] = []  # of the step that is being planned
        self._stop_sets: Counter[frozenset[int]] = Counter()
        self._rests_until = 0

    def marches(self) -> list[March]:
        """What the next step has of them."""
        return [March(formation) for formation in self._formations.values()]

    def split(self, running: Collection[Request]) -> tuple[list[Request], list[Request]]:
        """Lets those join that can, and looks at the others.

        Args:
            running: all running requests, in order of admission.

        Returns:
            Who is not in lockstep and has something to compute: those with one token to go, and those with more. An
            answer that catches up with several ids of one result stands before prompts that were admitted later.
        """
        decodes: list[Request] = []
        prefills: list[Request] = []
        joining: list[Request] = []
        if self.num_requests == len(running):
            return decodes, prefills
        may_join = self._is_open and self.clock.planned >= self._rests_until
        for request in running:
            if request.in_lockstep or request.num_planned >= request.compute_length:
                continue  # or all that it may produce is in flight
            if request.num_expected - request.num_planned > 1:
                prefills.append(request)
            elif (
                may_join
                and request.is_plain
                and not request.is_watched
                and request.num_planned < request.compute_length - 1
            ):
                joining.append(request)
            else:
                decodes.append(request)
        self._join(joining)
        return decodes, prefills

    def leave(self, request: Request, in_flight: Iterable[MarchingStep]) -> None:
        """Takes a request out.

        Args:
            request: one that is in lockstep.
            in_flight: the steps whose results have not come; the request's are then taken one by one.
        """
        formation = self._formations[request.lane]
        if len(formation) == 1:
            del self._formations[request.lane]
        else:
            self._formations[request.lane] = formation.without(formation.requests.index(request))
        for flight in in_flight:
            if flight.step >= request.joined_step:
                next(march for march in flight.marches if march.formation.lane == request.lane).leave(request)
        request.leave()
        self.num_requests -= 1
        self._stop_sets[request.stop_ids] -= 1
        if not self._stop_sets[request.stop_ids]:
            del self._stop_sets[request.stop_ids]
            self._sum_up_stop_ids()

    def dissolve(self, in_flight: Collection[MarchingStep]) -> None:
        """Takes everybody out, and lets nobody in for a while: results come that must be read row by row."""
        for formation in list(self._formations.values()):
            for request in reversed(formation.requests):
                self.leave(request, in_flight)
        self._rests_until = self.clock.planned + REST_STEPS

    def advance(self) -> None:
        """The result of one more step has been taken."""
        clock = self.clock
        clock.applied += 1
        if clock.applied % LOGGED_STEPS == 0:
            _ = clock.ids  # nothing stays noted for longer, whoever has left
            for formation in self._formations.values():
                for request in formation.requests:
                    request.write_down()

    def take_due(self) -> tuple[list[Request], list[Request]]:
        """Whom the next plan must look at: those who have their last token to go, and those whose pages are full."""
        step = self.clock.planned
        last = self._last_at.pop(step, ())
        self._full = self._full_at.pop(step, [])
        return _still_there(last), _still_there(self._full)

    def schedule_again(self) -> None:
        """Those whose pages were full have got one page more, or have left."""
        full_step = self.clock.planned + self._page_size
        again = [due for due in self._full if due[2] > full_step and due[0].joined_step == due[1]]
        if again:
            self._full_at.setdefault(full_step, []).extend(again)
        if len(again) < len(self._full):
            for due in self._full:
                if due[2] <= full_step:
                    self._last_at.setdefault(due[2], []).append(due)
        self._full = []

    def _join(self, requests: list[Request]) -> None:
        by_lane: dict[bytes, list[Request]] = {}
        for request in requests:
            request.join(self.clock)
            self._schedule(request)
            by_lane.setdefault(request.lane, []).append(request)
        for lane, of_lane in by_lane.items():
            self._formations[lane] = self._formations.get(lane, Formation(lane)).joined_by(of_lane, self.clock.planned)
        self.num_requests += len(requests)
        new_sets = Counter(request.stop_ids for request in requests)
        has_new = not new_sets.keys() <= self._stop_sets.keys()
        self._stop_sets += new_sets
        if has_new:
            self._sum_up_stop_ids()

    def _schedule(self, request: Request) -> None:
        """Notes when to look at it next."""
        step, planned = self.clock.planned, request.num_planned
        last_step = step + request.compute_length - 1 - planned
        full_step = step + len(request.pages) * self._page_size - planned  # where its next token has no page
        calendar, due_step = (self._last_at, last_step) if last_step <= full_step else (self._full_at, full_step)
        calendar.setdefault(due_step, []).append((request, step, last_step))

    def check(self, running: Iterable[Request]) -> None:
        """QueueError unless the columns are those of exactly the running requests that go in lockstep."""
        expected = [request for request in running if request.in_lockstep]
        present = [request for formation in self._formations.values() for request in formation.requests]
        if set(expected) != set(present) or len(present) != self.num_requests:
            raise QueueError(f"{len(present)} requests in lockstep instead of {len(expected)}")
        for lane, formation in self._formations.items():
            requests = formation.requests
            step = self.clock.planned
            is_right = (
                all(request.lane == lane for request in requests)
                and formation.rows == pack_int32(request.row for request in requests)
                and formation.request_ids == b"".join(request.request_id for request in requests)
                and formation.attempts == pack_int32(request.attempt for request in requests)
                and formation.cached_tokens == pack_int32(max(request.cached_tokens, 0) for request in requests)
                and formation.starts_of(step) == pack_int32(request.num_planned for request in requests)
                and formation.indexes_of(step)
                == pack_int32(request.num_planned + 1 - request.num_prompt for request in requests)
                and formation.accounts == Counter(request.account for request in requests)
            )
            if not is_right:
                raise QueueError("a column of the lockstep is not that of its requests")

    def _sum_up_stop_ids(self) -> None:
        self.stop_ids = frozenset().union(*self._stop_sets)


def _still_there(entries: Iterable[_Due]) -> list[Request]:
    """Those who have not left since."""
    return [request for request, joined_step, _ in entries if request.joined_step == joined_step]
