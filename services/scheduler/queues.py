"""scheduler: the queues of a core. A request stands in exactly one, the one that its state names.

`move` is the only way from one to another, so a state and a queue cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.compilations import Compilations
from services.scheduler.policy import WaitingQueue
from services.scheduler.request import Request, RequestState
from services.scheduler.siblings import Siblings
from services.scheduler.tenants import TenantShares


class QueueError(Exception):
    """A request in no queue, in two, or in another than its state says: a fault of the scheduler."""


class RequestQueues:
    """All open requests of one core."""

    def __init__(self) -> None:
        self.shares = TenantShares()
        self.open: dict[bytes, Request] = {}
        self.compiling = Compilations()
        self.held = Siblings()
        self.waiting = WaitingQueue(self.shares)
        self.running: dict[bytes, Request] = {}
        self.retracted: dict[bytes, Request] = {}

    @property
    def num_not_admitted(self) -> int:
        """Requests that never had a row."""
        return len(self.waiting) + len(self.held) + len(self.compiling)

    @property
    def num_admissible(self) -> int:
        """Requests that need nothing but a row and pages."""
        return len(self.retracted) + len(self.waiting)

    @property
    def num_plannable(self) -> int:
        """Open requests that need nothing but a plan to go on."""
        return len(self.open) - len(self.held) - len(self.compiling)

    def enter(self, request: Request) -> None:
        """Takes in a new request; the caller puts it into its first queue."""
        self.open[request.request_id] = request
        request.account = self.shares.enter(request.submit.tenant)

    def compile_first(self, request: Request) -> None:
        """Lets a new request wait for its grammar."""
        request.move_to(RequestState.COMPILING)
        self.compiling.add(request)

    def queue_up(self, request: Request, leader: Request | None) -> None:
        """Puts a request that is new, or whose grammar is compiled, into the line, or behind its leader's prompt."""
        if request.state is RequestState.COMPILING:
            self.compiling.remove(request)
        if leader is not None:
            request.move_to(RequestState.HELD)
            self.held.hold(request, leader)
            return
        if request.state is RequestState.COMPILING:
            request.move_to(RequestState.WAITING)
        self.waiting.add(request)

    def move(self, request: Request, state: RequestState) -> None:
        """Moves a request to the queue of another state; IllegalTransitionError when the table does not allow it."""
        previous = request.state
        request.move_to(state)
        self._take_out(request, previous)
        if state is RequestState.WAITING:
            self.waiting.add(request)
        elif state is RequestState.RUNNING:
            self.running[request.request_id] = request
        elif state is RequestState.RETRACTED:
            self.retracted[request.request_id] = request
        else:
            del self.open[request.request_id]
            self.shares.leave(request.submit.tenant)

    def release_held(self, leader: Request) -> None:
        """The leader's prompt is in the tree: its siblings may be admitted."""
        for request in self.held.waiting_for(leader):
            self.move(request, RequestState.WAITING)

    def replace_leader(self, leader: Request) -> None:
        """The leader ended without its prompt in the tree: the first of its siblings goes ahead for the others."""
        heirs = self.held.waiting_for(leader)
        for heir in heirs[1:]:
            self.held.remove(heir)
            self.held.hold(heir, heirs[0])
        if heirs:
            self.move(heirs[0], RequestState.WAITING)

    def check(self) -> None:
        """QueueError unless every open request stands in exactly the queue that its state names."""
        for request in self.open.values():
            places = [state for state, is_there in self._places(request) if is_there]
            if places != [request.state]:
                raise QueueError(f"a {request.state.value} request stands in {[place.value for place in places]}")
        num_queued = self.num_not_admitted + len(self.running) + len(self.retracted)
        if num_queued != len(self.open):
            raise QueueError(f"{num_queued} requests in queues, {len(self.open)} open")

    def _places(self, request: Request) -> Iterator[tuple[RequestState, bool]]:
        yield RequestState.COMPILING, request in self.compiling
        yield RequestState.HELD, request in self.held
        yield RequestState.WAITING, request in self.waiting
        yield RequestState.RUNNING, self.running.get(request.request_id) is request
        yield RequestState.RETRACTED, self.retracted.get(request.request_id) is request

    def _take_out(self, request: Request, previous: RequestState) -> None:
        if previous is RequestState.COMPILING:
            self.compiling.remove(request)
        elif previous is RequestState.HELD:
            self.held.remove(request)
        elif previous is RequestState.WAITING:
            self.waiting.remove(request)
        elif previous is RequestState.RUNNING:
            del self.running[request.request_id]
        else:
            del self.retracted[request.request_id]
