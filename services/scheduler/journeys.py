"""scheduler: how requests fare: their times here, the reports that tell of them, and the histograms over all.

Nothing here decides anything, and nothing is done for each token: a request is touched when it comes, when it is first
planned, when its first token comes, and when it ends. The shell brings the clock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from services.runtime.histogram import HOP_BOUNDS_S, Histogram
from services.scheduler.router import Record, Router
from services.wire.answers import HopReport
from services.wire.endpoints import Identity
from services.wire.finish import Finish
from services.wire.members import Role
from services.wire.transport import RouterPort

_REASONS = {
    Finish.STOP_TOKEN: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.ABORTED: "abort",
    Finish.TIMEOUT: "timeout",
}


class Journeys:
    """The times of all requests of one scheduler.

    Args:
        identity: the scheduler's own, named in reports.
        router: whose records carry the times.
        port: where reports go out; one for a peer that is gone, or whose outbox is full, is dropped.
        unix_s: the wall clock.
    """

    def __init__(
        self, identity: Identity, router: Router, port: RouterPort, unix_s: Callable[[], float] = time.time
    ) -> None:
        self.queue_seconds = Histogram(HOP_BOUNDS_S)
        self.prefill_seconds = Histogram(HOP_BOUNDS_S)
        self.finished: Counter[str] = Counter(dict.fromkeys([*_REASONS.values(), "error"], 0))
        self._identity = identity
        self._router = router
        self._port = port
        self._unix_s = unix_s

    def planned(self, now_s: float) -> bool:
        """Notes who is part of a plan for the first time, since the last call; whether anybody is."""
        is_any = False
        for core in self._router.cores.values():
            for request in core.take_started():
                is_any = True
                record = self._router.newest_attempt(request.request_id)
                if record is not None and record.request is request:
                    record.started_s = now_s
                    self.queue_seconds.observe(now_s - record.received_s)
        return is_any

    def first_token(self, record: Record, now_s: float) -> None:
        """The first token of this attempt came."""
        record.first_token_s = now_s
        self.prefill_seconds.observe(now_s - (record.started_s or now_s))
        if record.request.is_alive:  # else the report of the end follows at once
            self._report(record, now_s, {})

    def ended(self, record: Record, now_s: float) -> None:
        """The request ended."""
        self.finished[_REASONS.get(record.request.finish, "error")] += 1
        self._report(record, now_s, {"ended": 1.0})

    def _report(self, record: Record, now_s: float, counters: dict[str, float]) -> None:
        request = record.request
        received_s, started_s, first_token_s = record.received_s, record.started_s or now_s, record.first_token_s
        core = self._router.cores.get(record.worker)
        if core is not None:
            counters |= request.usage.counters(core.counters, len(request.pages))
            counters["plans_ahead"] = core.limits.plans_ahead
        if record.compiled_s:
            counters["grammar_us"] = _us(record.compiled_s - received_s)
        if first_token_s:
            counters["first_token_us"] = _us(first_token_s - received_s)
            counters["prefill_us"] = _us(first_token_s - started_s)
        report = HopReport(
            request_id=request.request_id,
            attempt=request.attempt,
            role=Role.SCHEDULER,
            instance=self._identity.instance,
            started_unix_us=max(0, _us(self._unix_s() - (now_s - received_s))),
            wait_us=_us(started_s - received_s),
            work_us=_us(now_s - started_s),
            counters=counters
            | {
                "prompt_tokens": request.num_prompt,
                "cached_tokens": max(request.cached_tokens, 0),
                "output_tokens": request.num_output,
            },
        )
        self._port.send(record.tokenizer, report)


def _us(seconds: float) -> int:
    return int(1e6 * seconds)
