"""scheduler: what it counts, and how a heartbeat reads it."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.runtime.metrics import counter, gauge, histogram, labelled_counter, labelled_gauge
from services.scheduler.answers import Answers
from services.scheduler.core_counters import CoreCounters
from services.scheduler.membership import Membership
from services.scheduler.workers import Workers
from services.wire.members import Role
from services.wire.transport import Port


class SchedulerCollector(Collector):
    """Reads cores and records when asked, so that counting costs the loop nothing more than an addition."""

    def __init__(self, workers: Workers, answers: Answers, port: Port, membership: Membership) -> None:
        self._workers = workers
        self._answers = answers
        self._port = port
        self._membership = membership
        self.num_unexpected = 0

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        yield from self._requests()
        yield from self._routes()
        yield from self._pages()
        yield from self._work()
        yield from self._messages()
        yield from self._times()

    def _requests(self) -> Iterable[Metric]:
        router, finished = self._workers.router, self._answers.journeys.finished
        cores = list(router.cores.values())
        yield gauge("scheduler_num_requests_running", sum(core.num_running for core in cores))
        yield gauge("scheduler_num_requests_waiting", sum(core.num_waiting for core in cores))
        yield gauge("scheduler_num_requests_held", sum(len(core.queues.held) for core in cores))
        yield gauge("scheduler_num_requests_compiling", sum(len(core.queues.compiling) for core in cores))
        yield gauge("scheduler_num_requests_retracted", sum(core.num_retracted for core in cores))
        yield gauge("scheduler_num_requests_speculating", sum(core.speculation.num_watched for core in cores))
        yield gauge("scheduler_paused", self._workers.is_paused)
        yield gauge("scheduler_records", router.num_records)
        yield counter("scheduler_refused_requests", self._answers.num_refused)
        yield labelled_counter("scheduler_finished", ["reason"], {(name,): n for name, n in finished.items()})

    def _routes(self) -> Iterable[Metric]:
        backlogs = self._workers.router.backlogs
        chunks: dict[tuple[str, ...], float] = {}
        here = [peer for peer in self._membership.of(Role.GPU_WORKER) if peer.routing_id in backlogs]
        routed: dict[tuple[str, ...], float] = {}
        loads: dict[tuple[str, ...], float] = {}
        for peer in here:
            backlog = backlogs[peer.routing_id]
            routed[peer.hello.instance,] = backlog.num_routed
            loads[peer.hello.instance,] = backlog.load_ms / 1000
            core = self._workers.router.cores[peer.routing_id]
            chunks[peer.hello.instance,] = core.pace.budget(core.limits.prefill_budget(1), 1).most_at_beginning
        yield labelled_counter("scheduler_routed_requests", ["worker"], routed)
        yield labelled_gauge("scheduler_chunk_tokens", ["worker"], chunks)
        yield labelled_gauge("scheduler_worker_load_seconds", ["worker"], loads)
        yield counter("scheduler_moved_requests", self._workers.router.num_moved)

    def _pages(self) -> Iterable[Metric]:
        ledgers = [core.ledger for core in self._workers.router.cores.values()]
        num_pages = sum(ledger.pool.num_pages for ledger in ledgers)
        num_free = sum(ledger.pool.num_free for ledger in ledgers)
        num_cached = sum(ledger.cache.num_evictable_pages for ledger in ledgers)
        num_evicted = self._workers.left_evicted + sum(ledger.num_evicted_pages for ledger in ledgers)
        yield gauge("scheduler_kv_pages", num_pages)
        yield gauge("scheduler_kv_pages_free", num_free)
        yield gauge("scheduler_kv_pages_cached", num_cached)
        yield gauge("scheduler_kv_pages_used", num_pages - num_free - num_cached)
        yield counter("scheduler_evicted_pages", num_evicted)

    def _work(self) -> Iterable[Metric]:
        cores = list(self._workers.router.cores.values())
        sums = CoreCounters()
        for counters in (self._workers.left, *(core.counters for core in cores)):
            sums.add(counters)
        yield gauge("scheduler_plans_in_flight", sum(core.num_in_flight for core in cores))
        yield counter("scheduler_steps", sums.steps)
        yield counter("scheduler_prompt_tokens", sums.prompt_tokens)
        yield counter("scheduler_cached_tokens", sums.cached_tokens)
        yield counter("scheduler_computed_tokens", sums.computed_tokens)
        yield counter("scheduler_output_tokens", sums.output_tokens)
        yield counter("scheduler_proposed_tokens", sums.proposed_tokens)
        yield counter("scheduler_accepted_tokens", sums.accepted_tokens)
        yield counter("scheduler_admitted", sums.admitted)
        yield counter("scheduler_retracted", sums.retracted)
        yield counter("scheduler_dropped_rows", sums.dropped_rows)
        yield counter("scheduler_failed_rows", sums.failed_rows)

    def _messages(self) -> Iterable[Metric]:
        depths, of_role = self._port.outbox_depths(), self._membership.of
        roles = (Role.TOKENIZER, Role.DETOKENIZER, Role.GPU_WORKER)
        outboxes: dict[tuple[str, ...], float] = {
            (str(role),): sum(depths.get(peer.routing_id, 0) for peer in of_role(role)) for role in roles
        }
        yield labelled_gauge("scheduler_outbox_frames", ["link"], outboxes)
        yield counter("scheduler_stale_messages", self._workers.router.num_stale)
        yield counter("scheduler_dropped_messages", self.num_unexpected + self._port.stats.rejected)

    def _times(self) -> Iterable[Metric]:
        workers, journeys = self._workers, self._answers.journeys
        yield histogram("scheduler_queue_seconds", journeys.queue_seconds)
        yield histogram("scheduler_prefill_seconds", journeys.prefill_seconds)
        yield histogram("scheduler_step_rows", workers.step_rows)
        yield histogram("scheduler_step_tokens", workers.step_tokens)
        yield histogram("scheduler_plan_seconds", workers.plan_seconds)
