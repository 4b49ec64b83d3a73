"""gpu_worker: what this worker can tell of its machine, of its model's steps and of how the model was loaded.

Owns the counts of steps beside their costs. It reads a plan's columns and a result's times, and never a tensor.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter

import torch

from services.gpu_worker.machine_limits import MachineLimits, machine_limits
from services.gpu_worker.step_cost import ModelCost, StepCost
from services.gpu_worker.step_meter import StepMeter
from services.gpu_worker.weights import LoadReport
from services.wire.columns import unpack_int32
from services.wire.steps import StepPlan, StepResult

LOG_INTERVAL_S = 10.0
_UNSTEADY = 1.5  # on idle cores the spread is 1.1 or 1.2, beside one busy program on two cores 1.8 and more

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a worker runs on.

    Attributes:
        device: `cpu` or `cuda`.
        name: of the device, for people.
        dtype: that most products are computed in.
        num_threads: of the CPU's kernels.
        limits: measured.
    """

    device: str
    name: str
    dtype: str
    num_threads: int
    limits: MachineLimits


@dataclass(frozen=True, slots=True)
class Loaded:
    """How the weights came: `num_stored_bytes` of them from the disk itself, the rest from the system's file cache.

    None where the system does not tell.
    """

    report: LoadReport
    num_stored_bytes: int | None

    @property
    def origin(self) -> str:
        """For the log, behind how fast they were read: how many came from storage; "" where nobody can tell."""
        return "" if self.num_stored_bytes is None else f", {self.num_stored_bytes / 1e6:.1f} MB of it from storage"


def measure_machine(device: torch.device, name: str, dtype: torch.dtype) -> Machine:
    """Measures what steps are held against: some tenths of a second, before there is any request; leaves a log line."""
    began = perf_counter()
    limits = machine_limits(device, dtype)
    seconds = perf_counter() - began
    shown = str(dtype).removeprefix("torch.")
    upload = f", {limits.upload_bytes_per_s / 1e9:.1f} GB/s to the device" if limits.upload_bytes_per_s else ""
    logger.info(
        "limits of %s: %.1f GB/s from memory, %.0f GFLOP/s of %s products%s (spread %.1f, measured in %.2f s)",
        name, limits.bytes_per_s / 1e9, limits.operations_per_s / 1e9, shown, upload, limits.spread, seconds,
    )  # fmt: skip
    if limits.spread > _UNSTEADY:
        logger.warning("limits were measured while others used the machine: shares of them may be off by as much")
    return Machine(device.type, name, shown, torch.get_num_threads(), limits)


class Roofline:
    """The steps of one worker beside what its machine can do."""

    def __init__(self, machine: Machine, loaded: Loaded, cost: ModelCost) -> None:
        self.machine = machine
        self.loaded = loaded
        self.meter = StepMeter(machine.limits)
        self._cost = cost
        self._next_log_s = 0.0

    def count(self, plan: StepPlan, result: StepResult) -> StepCost:
        """Counts a step that has run; what it asked of the machine."""
        starts, counts = unpack_int32(plan.start_positions), unpack_int32(plan.num_new_tokens)
        cost = self._cost.of_step(starts, counts, sum(unpack_int32(plan.proposal_counts)))
        self.meter.count(cost, result.forward_us, result.step_us)
        return cost

    def log_news(self, now_s: float) -> None:
        """Logs what has run since the last lines, every ten seconds, and nothing where nothing has."""
        if now_s < self._next_log_s:
            return
        self._next_log_s = now_s + LOG_INTERVAL_S
        for line in self.meter.news():
            logger.info(line)
