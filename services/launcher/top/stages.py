"""What each stage of a group does, where, and what bounds it, from its metrics. Pure.

A worker starts once: `libraries`, then weights, `disk → memory`, `decoding` of quantized blocks, `memory → device`,
`laying out`; what is compiled and measured; `warm-up`; `recording` of decode steps. Together these are its start.
Requests pass `tokenizer`, `prefill`, `decode`, `sampling` and `output`. A forward pass is held against the limits that
its worker has measured; a stage of one process after another against the time that these processes have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.launcher.top.samples import Window

_PASSES = ("prefill", "decode")
_BESIDE_WEIGHTS = {
    "compile": "compiling loops",
    "forms": "measuring forms",
    "limits": "measuring limits",
    "warm_up": "warm-up",
    "recording": "recording",
}
"""Names of what a start does once it has the weights, or while it gets them."""


@dataclass(frozen=True)
class Stage:
    """One row.

    Attributes:
        name: of the stage.
        hardware: what it runs on.
        bound: what it waits for at least: disk, file cache, PCIe, memory, compute or CPU; "" where nobody can tell.
        seconds: that it took, added up over its processes.
        busy: share of the window in which it was at work; None without a window, and of a start.
        num_tokens, num_bytes, num_operations: what it moved and did; None where it is not counted.
        share: of the limit; None where there is none that could be known.
    """

    name: str
    hardware: str
    bound: str
    seconds: float
    busy: float | None = None
    num_tokens: float | None = None
    num_bytes: float | None = None
    num_operations: float | None = None
    share: float | None = None

    def per_second(self, amount: float | None) -> float | None:
        """An amount over the time that the stage took."""
        return None if amount is None or self.seconds <= 0 else amount / self.seconds


@dataclass(frozen=True)
class Worker:
    """What a worker runs on, and its limits."""

    instance: str
    device: str
    name: str
    dtype: str
    threads: str
    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Load:
    """Requests and pages now; tokens a second in the window, None without one."""

    running: int
    waiting: int
    kv_pages: int
    kv_used: int
    kv_cached: int
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None


def load_of(window: Window) -> Load:
    """How much there is to do."""
    now, seconds = window.samples, window.seconds
    prompts = window.growth("worker_stage_tokens_total", stage="prefill")
    return Load(
        running=int(now.total("scheduler_num_requests_running")),
        waiting=int(now.total("scheduler_num_requests_waiting")),
        kv_pages=int(now.total("scheduler_kv_pages")),
        kv_used=int(now.total("scheduler_kv_pages_used")),
        kv_cached=int(now.total("scheduler_kv_pages_cached")),
        output_tokens_per_s=window.growth("scheduler_output_tokens_total") / seconds if seconds else None,
        prompt_tokens_per_s=prompts / seconds if seconds else None,
    )


def workers_of(window: Window) -> list[Worker]:
    """All of them."""
    return [_worker(window, dict(labels)) for labels in window.samples.of("worker_machine")]


def _worker(window: Window, labels: dict[str, str]) -> Worker:
    instance = labels.get("instance", "")
    return Worker(
        instance=instance,
        device=labels.get("device", ""),
        name=labels.get("name", ""),
        dtype=labels.get("dtype", ""),
        threads=labels.get("threads", ""),
        bytes_per_s=window.samples.total("worker_limit_memory_bytes_per_second", instance=instance),
        operations_per_s=window.samples.total("worker_limit_operations_per_second", instance=instance),
    )


def stages_of(window: Window) -> list[Stage]:
    """All stages in the order in which a start, then requests, pass them."""
    workers = workers_of(window)
    hardware = ", ".join(dict.fromkeys("CPU" if worker.device == "cpu" else worker.name for worker in workers))
    names = {dict(labels).get("stage", "") for labels in window.samples.of("worker_start_seconds")}
    start_s = {name: window.samples.total("worker_start_seconds", stage=name) for name in names}
    return [*_starting(window, start_s, hardware), *_serving(window, hardware)]


def _starting(window: Window, start_s: Mapping[str, float], hardware: str) -> Iterator[Stage]:
    """What a start took; of a worker that does not tell of it the weights alone."""
    if "libraries" in start_s:
        yield Stage("libraries", "CPU", "CPU", start_s["libraries"])
    weights = list(_loading(window))
    yield from weights
    rest_s = start_s.get("weights", 0.0) - sum(stage.seconds for stage in weights)
    if rest_s > 0:
        yield Stage("laying out", "CPU", "CPU", rest_s)
    for key, name in _BESIDE_WEIGHTS.items():
        if key in start_s:
            where = "CPU" if key == "compile" else hardware
            yield Stage(name, where, "CPU" if where == "CPU" else "", start_s[key])


def _loading(window: Window) -> Iterator[Stage]:
    now = window.samples

    def seconds(stage: str) -> float:
        return now.total("worker_load_seconds", stage=stage)

    num_read, num_placed = (now.total("worker_load_bytes", stage=stage) for stage in ("disk", "device"))
    if num_read:
        is_stored = 2 * now.total("worker_load_bytes", stage="storage") >= num_read
        yield Stage("disk → memory", "disk", "disk" if is_stored else "file cache", seconds("disk"), num_bytes=num_read)
    if seconds("decode"):
        yield Stage("decoding", "CPU", "CPU", seconds("decode"))
    if num_placed:
        limit = now.total("worker_limit_upload_bytes_per_second") / max(1, len(workers_of(window)))
        hardware, bound = ("PCIe", "PCIe") if limit else ("CPU", "CPU")
        took_s = seconds("device")
        share = num_placed / took_s / limit if limit and took_s else None
        yield Stage("memory → device", hardware, bound, took_s, num_bytes=num_placed, share=share)


def _serving(window: Window, hardware: str) -> Iterator[Stage]:
    workers = workers_of(window)
    num_prompt = window.growth("prompt_tokens_total")
    yield _in_turns(window, "tokenizer", window.growth("hop_seconds_sum", hop="tokenize"), num_prompt)
    for name in _PASSES:
        yield _passes(window, name, hardware, len(workers))
    seconds = window.growth("worker_stage_seconds_total", stage="sampling")
    bound = "CPU" if all(worker.device == "cpu" for worker in workers) else ""
    yield Stage("sampling", hardware, bound, seconds, _busy(window, seconds, len(workers)))
    turns_s = window.growth("detokenizer_decode_seconds_sum")
    yield _in_turns(window, "output", turns_s, window.growth("detokenizer_tokens_total"), "detokenizer_tokens_total")


def _passes(window: Window, name: str, hardware: str, num_workers: int) -> Stage:
    """Forward passes of a kind beside the limits of their workers."""
    seconds = window.growth("worker_stage_seconds_total", stage=name)
    limits = {
        bound: window.growth("worker_stage_limit_seconds_total", stage=name, bound=bound)
        for bound in ("memory", "compute")
    }
    return Stage(
        name=name,
        hardware=hardware,
        bound=max(limits, key=limits.__getitem__) if any(limits.values()) else "",
        seconds=seconds,
        busy=_busy(window, seconds, num_workers),
        num_tokens=window.growth("worker_stage_tokens_total", stage=name),
        num_bytes=window.growth("worker_stage_bytes_total", stage=name),
        num_operations=window.growth("worker_stage_operations_total", stage=name),
        share=sum(limits.values()) / seconds if seconds else None,
    )


def _in_turns(
    window: Window, name: str, seconds: float, num_tokens: float, counter: str = "prompt_tokens_total"
) -> Stage:
    """A stage whose processes do one thing at a time: its limit is all of their time."""
    busy = _busy(window, seconds, window.samples.instances(counter))
    return Stage(name, "CPU", "CPU", seconds, busy, num_tokens, share=busy)


def _busy(window: Window, seconds: float, num_processes: int) -> float | None:
    return seconds / (window.seconds * num_processes) if window.seconds and num_processes else None
