"""scheduler: how many pages a request will need, who gets some now, and who gives up its own when there are none.

It owns nothing: it looks at the ledger, the limits and the estimate of what answers still grow by.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from services.scheduler.admission import CoreLimits
from services.scheduler.kv_ledger import KvLedger, LedgerError
from services.scheduler.policy import RemainderEstimate
from services.scheduler.request import Request, RequestState


class Reservations:
    """The pages of one core, now and in the steps to come."""

    def __init__(self, ledger: KvLedger, limits: CoreLimits, estimate: RemainderEstimate) -> None:
        self.estimate = estimate
        self._ledger = ledger
        self._limits = limits

    def expected_growth(self, request: Request) -> int:
        """Pages that it will need beyond those it has."""
        num_more = self.estimate.expected_tokens(request.max_length - request.num_expected)
        num_tokens = min(request.num_expected + num_more, request.compute_length)
        return max(self._ledger.pages_for(num_tokens) - len(request.pages), 0)

    def admit(self, request: Request, budget: int, num_reserved: int, is_alone: bool) -> bool:
        """Gives a request its pages, if that leaves `num_reserved` for those that run, and what it will need itself.

        Args:
            request: one without pages.
            budget: tokens that the step has left; a prompt that may not be cut must fit.
            num_reserved: pages that those that run are expected to need.
            is_alone: nothing runs: then it may have everything, since it was checked to fit.
        """
        if not self._limits.is_chunked and request.num_tokens - self._ledger.peek(request) > budget:
            return False
        if is_alone:
            return self._ledger.take(request, 0)
        own_growth = self.expected_growth(request) - self._ledger.pages_for(request.num_tokens)
        return self._ledger.take(request, num_reserved + own_growth)

    def grow(
        self,
        full: Sequence[Request],
        others: Sequence[Request],
        running: Collection[Request],
        retract: Callable[[Request], None],
    ) -> dict[int, list[int]]:
        """Gives pages to those that have filled theirs.

        Args:
            full: who needs exactly one page for this step: they get them at once if there are enough.
            others: who will compute in this step and may need some.
            running: all that run, always up to date.
            retract: takes one of them out, when there are too few pages.

        Returns:
            Row -> its new pages.
        """
        if not full and not others:
            return {}
        pages_of_full = self._ledger.extend_each(full)
        appended = {request.row: [page] for request, page in zip(full, pages_of_full, strict=False)}
        page_size = self._limits.page_size
        for request in others if pages_of_full else [*full, *others]:
            if request.num_expected <= len(request.pages) * page_size:
                continue
            num_missing = -(-request.num_expected // page_size) - len(request.pages)
            while request.state is RequestState.RUNNING:
                pages = self._ledger.extend(request, num_missing)
                if pages is not None:
                    appended[request.row] = pages
                    break
                victim = self.cheapest_victim(running)
                appended.pop(victim.row, None)
                retract(victim)
        return appended

    def cheapest_victim(self, running: Collection[Request]) -> Request:
        """The running request whose lost work costs least; among equals the youngest.

        Raises:
            LedgerError: only one runs: it was checked to fit.
        """
        if len(running) < 2:
            raise LedgerError("a request that runs alone is out of pages, though it was checked to fit")
        return min(running, key=self._cost)

    def _cost(self, request: Request) -> tuple[bool, int, int]:
        num_pages = self._ledger.num_exclusive_pages(request)
        num_kept = (len(request.pages) - num_pages) * self._limits.page_size
        is_nearly_done = request.num_planned >= request.compute_length  # its last tokens are in flight already
        return num_pages == 0, 0 if is_nearly_done else request.num_planned - num_kept, -request.arrival
