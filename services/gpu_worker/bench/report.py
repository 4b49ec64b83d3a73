"""gpu_worker: what a measurement tells its parent: JSON, a line each."""

from __future__ import annotations

import json

from services.gpu_worker.machine_limits import MachineLimits
from services.gpu_worker.roofline import Machine


class BenchError(Exception):
    """It cannot be measured; one line."""


def tell(**content: object) -> None:
    """Prints a line at once."""
    print(json.dumps(content, ensure_ascii=False), flush=True)


def tell_machine(machine: Machine) -> None:
    """What it is measured on, and the limits that shares are of."""
    limits = machine.limits
    tell(
        machine={
            "device": machine.device,
            "name": machine.name,
            "dtype": machine.dtype,
            "threads": machine.num_threads,
            "bytes_per_s": limits.bytes_per_s,
            "operations_per_s": limits.operations_per_s,
        }
    )


def beside_limits(seconds: float, num_bytes: int, num_operations: int, limits: MachineLimits) -> dict[str, object]:
    """Rates, the share of the limit, and what that is of."""
    memory_s, compute_s = num_bytes / limits.bytes_per_s, num_operations / limits.operations_per_s
    return {
        "bytes_per_s": num_bytes / seconds,
        "operations_per_s": num_operations / seconds,
        "bound": "memory" if memory_s >= compute_s else "compute",
        "share": max(memory_s, compute_s) / seconds,
    }
