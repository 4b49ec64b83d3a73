"""scheduler: who is admitted next, and how many answers fit at once.

Order among the waiting: the tenant that was served least, then priority (a lower number is earlier, as in vLLM), then
the longest cached prefix among the first PREFIX_WINDOW in order of arrival. Age keeps them from starving anybody: what
has waited through AGE_LIMIT_PASSES passes that admitted others goes before longer prefixes of the same tenant and
priority, and every AGE_TURN_PASSES-th pass goes to those who have waited longest, whosoever they are. A plain age limit
over everything would make a long queue first come, first served, and void tenants and priorities just when they matter.

It owns the waiting queue and the shares. It must never touch pages, and time here is counted in passes and steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from services.scheduler.request import Request
from services.scheduler.tenants import TenantShares

PREFIX_WINDOW = 128
AGE_LIMIT_PASSES = 24  # a cold request is admitted within 32 passes: this many, and some for others that are as old
AGE_TURN_PASSES = 32
HORIZON_STEPS = 32  # nothing is admitted if everything running could be out of pages within so many steps

_FIRST_SHARE = 0.3  # of what an answer may still grow, expected before anything was learned
_LEAST_SHARE = 0.1
_RAISE_PER_RETRACTION = 0.1
_DECAY_PER_STEP = 0.9995  # back to half in about 1,400 steps


class WaitingQueue:
    """Requests that have not been admitted yet, found by tenant, priority and arrival.

    Args:
        shares: who was served how much.
    """

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._by_arrival: OrderedDict[bytes, Request] = OrderedDict()
        self._by_tenant: dict[str, dict[int, OrderedDict[bytes, Request]]] = {}
        self._num_passes = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, request: Request) -> bool:
        return self._by_arrival.get(request.request_id) is request

    def add(self, request: Request) -> None:
        """Puts a request behind all that wait."""
        request.queued_pass = self._num_passes
        self._by_arrival[request.request_id] = request
        priorities = self._by_tenant.setdefault(request.submit.tenant, {})
        priorities.setdefault(request.submit.priority, OrderedDict())[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands; KeyError when it does not wait."""
        del self._by_arrival[request.request_id]
        priorities = self._by_tenant[request.submit.tenant]
        queue = priorities[request.submit.priority]
        del queue[request.request_id]
        if not queue:
            del priorities[request.submit.priority]
        if not priorities:
            del self._by_tenant[request.submit.tenant]

    def first(self, cached_tokens: Callable[[Request], int]) -> Request | None:
        """Who is next; None when nobody waits.

        Args:
            cached_tokens: how much of a request the prefix cache holds now.
        """
        if not self._by_arrival:
            return None
        if self._num_passes % AGE_TURN_PASSES == AGE_TURN_PASSES - 1:
            return next(iter(self._by_arrival.values()))
        tenant = min(self._by_tenant, key=self._shares.served_tokens)
        priorities = self._by_tenant[tenant]
        queue = priorities[min(priorities)]
        oldest = next(iter(queue.values()))
        if self._num_passes - oldest.queued_pass >= AGE_LIMIT_PASSES:
            return oldest
        return max(islice(queue.values(), PREFIX_WINDOW), key=cached_tokens)

    def count_pass(self) -> None:
        """Says that a pass admitted somebody: everyone who still waits grew older by one."""
        self._num_passes += 1


class RemainderEstimate:
    """What running answers are expected to grow by: a share of what they may, learned from retractions."""

    def __init__(self) -> None:
        self._share = _FIRST_SHARE

    @property
    def share(self) -> float:
        """The present share, in [0.1, 1]."""
        return self._share

    def on_retraction(self) -> None:
        """More was admitted than fitted: expect more."""
        self._share = min(1.0, self._share + _RAISE_PER_RETRACTION)

    def on_step(self) -> None:
        """A step went well: expect a little less."""
        self._share = max(_LEAST_SHARE, self._share * _DECAY_PER_STEP)

    def expected_tokens(self, num_remaining: int) -> int:
        """Tokens to reserve for an answer that may still grow by `num_remaining` (>= 0)."""
        return max(min(num_remaining, HORIZON_STEPS), int(self._share * num_remaining))
