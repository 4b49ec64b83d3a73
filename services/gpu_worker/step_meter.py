"""gpu_worker: how near its steps come to what the machine can do, added up by stage. Pure: it is told every time.

    prefill    forward passes in which some row computes several tokens, decoding rows beside it or not
    decode     forward passes in which every row computes one
    sampling   the rest of all steps: laying out, masks, sampling, copying back

A pass that moved its bytes and did its operations at the machine's limits would take the longer of both times; which of
them that is says what bounds it. What a pass takes beyond that, no limit of memory or arithmetic explains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from services.gpu_worker.machine_limits import MachineLimits
from services.gpu_worker.step_cost import StepCost


class Stage(StrEnum):
    """Kinds of forward passes."""

    PREFILL = "prefill"
    DECODE = "decode"


class Bound(StrEnum):
    """What a pass has to wait for at least."""

    MEMORY = "memory"
    COMPUTE = "compute"


@dataclass(slots=True)
class StageTotals:
    """What the passes of one stage came to.

    Attributes:
        num_steps, num_tokens, num_bytes, num_operations: see `StepCost`.
        forward_us: microseconds that they took.
        limit_s: by bound, seconds that those bounded so would take at the machine's limits.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_operations: int = 0
    forward_us: int = 0
    limit_s: dict[Bound, float] = field(default_factory=lambda: dict.fromkeys(Bound, 0.0))

    def since(self, before: StageTotals) -> StageTotals:
        """What has come since then."""
        return StageTotals(
            self.num_steps - before.num_steps,
            self.num_tokens - before.num_tokens,
            self.num_bytes - before.num_bytes,
            self.num_operations - before.num_operations,
            self.forward_us - before.forward_us,
            {bound: seconds - before.limit_s[bound] for bound, seconds in self.limit_s.items()},
        )

    def copy(self) -> StageTotals:
        """As it is now."""
        return replace(self, limit_s=dict(self.limit_s))

    def line(self, name: str) -> str:
        """For the log."""
        seconds = max(self.forward_us, 1) / 1e6
        bound = max(self.limit_s, key=self.limit_s.__getitem__)
        return (
            f"{name}: {self.num_steps} passes, {self.num_tokens} tokens in {seconds:.2f} s "
            f"({self.num_tokens / seconds:.0f} tokens/s), {self.num_bytes / seconds / 1e9:.2f} GB/s, "
            f"{self.num_operations / seconds / 1e9:.1f} GFLOP/s: {sum(self.limit_s.values()) / seconds:.0%} of the "
            f"limit ({bound})"
        )


class StepMeter:
    """Adds up steps."""

    def __init__(self, limits: MachineLimits) -> None:
        self.limits = limits
        self.totals = {stage: StageTotals() for stage in Stage}
        self.sampling_us = 0
        self._told = {stage: StageTotals() for stage in Stage}
        self._told_sampling_us = 0

    def count(self, cost: StepCost, forward_us: int, step_us: int) -> None:
        """Counts one step, with the microseconds of its forward pass and of all of it."""
        totals = self.totals[Stage.DECODE if cost.is_decode else Stage.PREFILL]
        totals.num_steps += 1
        totals.num_tokens += cost.num_tokens
        totals.num_bytes += cost.num_bytes
        totals.num_operations += cost.num_operations
        totals.forward_us += forward_us
        self.sampling_us += max(0, step_us - forward_us)
        memory_s = cost.num_bytes / self.limits.bytes_per_s
        compute_s = cost.num_operations / self.limits.operations_per_s
        if memory_s >= compute_s:
            totals.limit_s[Bound.MEMORY] += memory_s
        else:
            totals.limit_s[Bound.COMPUTE] += compute_s

    def news(self) -> Iterator[str]:
        """Lines about what has come since they were last asked for; none where nothing has."""
        for stage, totals in self.totals.items():
            new = totals.since(self._told[stage])
            if new.num_steps:
                yield new.line(stage)
            self._told[stage] = totals.copy()
        if self.sampling_us > self._told_sampling_us:
            yield f"sampling and the rest of steps: {(self.sampling_us - self._told_sampling_us) / 1e6:.2f} s"
        self._told_sampling_us = self.sampling_us
