"""gpu_worker: what it counts, and how a heartbeat reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.gpu_worker.scheduler_link import SchedulerLink
from services.gpu_worker.start_up import ReadyWorker
from services.runtime.histogram import Histogram
from services.runtime.metrics import counter, gauge, histogram, labelled_counter, labelled_gauge
from services.wire.steps import StepPlan, StepResult

_STEP_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.35, 0.5,
    1.0, 2.5, 10.0,
)  # fmt: skip
_STAGE = ["stage"]


@dataclass(slots=True)
class Counters:
    """What happened so far; these only grow."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    forward_us: int = 0


class WorkerInstruments(Collector):
    """Counts results as they go out; reads the rest when asked."""

    def __init__(self, worker: ReadyWorker, link: SchedulerLink, registry: CollectorRegistry) -> None:
        self._worker = worker
        self._link = link
        self._counters = Counters()
        self._step_seconds = Histogram(_STEP_BOUNDS_S)
        registry.register(self)

    def count(self, plan: StepPlan, result: StepResult) -> None:
        """Counts one step that has run."""
        counters = self._counters
        counters.num_steps += 1
        counters.num_computed_tokens += self._worker.roofline.count(plan, result).num_tokens
        counters.num_sampled_tokens += len(result.token_ids) // 4
        counters.forward_us += result.forward_us
        self._step_seconds.observe(result.step_us / 1e6)

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        counters, worker, stats = self._counters, self._worker, self._link.port.stats
        kv_bytes = counters.num_computed_tokens * worker.kv_bytes_per_token
        refused = self._link.num_refused + stats.rejected
        yield counter("worker_steps", counters.num_steps)
        yield counter("worker_computed_tokens", counters.num_computed_tokens)
        yield counter("worker_sampled_tokens", counters.num_sampled_tokens)
        yield counter("worker_failed_rows", worker.state.num_failed_rows)
        yield counter("worker_forward_seconds", counters.forward_us / 1e6)
        yield counter("worker_kv_write_bytes", kv_bytes)
        yield counter("worker_refused_messages", refused)
        yield histogram("worker_step_seconds", self._step_seconds)
        yield from self._grammars()
        yield from self._stages()
        yield from self._machine()
        yield gauge("worker_held_rows", worker.state.num_held)
        yield gauge("worker_kv_pool_bytes", worker.num_pool_bytes)
        yield gauge("worker_chunk_tokens", worker.card.chunk_tokens)
        yield gauge("worker_outbox_frames", stats.outbox_frames)

    def _grammars(self) -> Iterable[Metric]:
        rows, compiler = self._worker.grammars, self._worker.grammars.compiler
        yield histogram("worker_mask_seconds", rows.mask_seconds)
        yield histogram("worker_mask_wait_seconds", rows.wait_seconds)
        yield histogram("worker_grammar_compile_seconds", compiler.compile_seconds)
        yield counter("worker_compiled_grammars", compiler.counters.num_compiled)
        yield counter("worker_refused_grammars", compiler.counters.num_refused)
        yield counter("worker_known_grammars", compiler.counters.num_cached)
        yield counter("worker_killed_grammar_children", compiler.num_children_killed)
        yield counter("worker_forced_tokens", rows.num_forced)
        yield gauge("worker_kept_grammars", compiler.num_templates)

    def _stages(self) -> Iterable[Metric]:
        meter = self._worker.roofline.meter
        totals = {(str(stage),): each for stage, each in meter.totals.items()}
        seconds: dict[tuple[str, ...], float] = {key: each.forward_us / 1e6 for key, each in totals.items()}
        seconds["sampling",] = meter.sampling_us / 1e6
        yield labelled_counter("worker_stage_seconds", _STAGE, seconds)
        yield labelled_counter("worker_stage_steps", _STAGE, {key: each.num_steps for key, each in totals.items()})
        yield labelled_counter("worker_stage_tokens", _STAGE, {key: each.num_tokens for key, each in totals.items()})
        yield labelled_counter("worker_stage_bytes", _STAGE, {key: each.num_bytes for key, each in totals.items()})
        operations: dict[tuple[str, ...], float] = {key: each.num_operations for key, each in totals.items()}
        yield labelled_counter("worker_stage_operations", _STAGE, operations)
        limits: dict[tuple[str, ...], float] = {
            (*key, str(bound)): s for key, each in totals.items() for bound, s in each.limit_s.items()
        }
        yield labelled_counter("worker_stage_limit_seconds", [*_STAGE, "bound"], limits)

    def _machine(self) -> Iterable[Metric]:
        machine, limits = self._worker.roofline.machine, self._worker.roofline.machine.limits
        values = (machine.device, machine.name, machine.dtype, str(machine.num_threads))
        yield labelled_gauge("worker_machine", ["device", "name", "dtype", "threads"], {values: 1})
        yield gauge("worker_limit_memory_bytes_per_second", limits.bytes_per_s)
        yield gauge("worker_limit_operations_per_second", limits.operations_per_s)
        yield gauge("worker_limit_upload_bytes_per_second", limits.upload_bytes_per_s)
        loaded, report = self._worker.roofline.loaded, self._worker.roofline.loaded.report
        seconds = {"disk": report.disk_s, "decode": report.decode_s, "device": report.place_s, "all": report.total_s}
        yield labelled_gauge("worker_load_seconds", _STAGE, {(stage,): value for stage, value in seconds.items()})
        start_s: dict[tuple[str, ...], float] = {(str(stage),): value for stage, value in self._worker.start_s.items()}
        yield labelled_gauge("worker_start_seconds", _STAGE, start_s)
        num_bytes = {"disk": report.num_bytes_read, "device": report.num_bytes_placed}
        if loaded.num_stored_bytes is not None:
            num_bytes["storage"] = loaded.num_stored_bytes
        yield labelled_gauge("worker_load_bytes", _STAGE, {(stage,): value for stage, value in num_bytes.items()})
