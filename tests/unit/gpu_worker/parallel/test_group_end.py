"""What a group leaves behind when it has ended as it should: no thread that could outlive the interpreter."""

from __future__ import annotations

from tests.unit.gpu_worker.parallel.two_ranks import start_ranks

_PROGRAM = """
import os
import torch
from services.gpu_worker.parallel.commands import Command, Operation
from services.gpu_worker.parallel.group import meet
from services.runtime.rank_place import rank_place

def gloo_threads():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)

group = meet(rank_place(), torch.device("cpu"), lambda: None)
group.serve() if group.is_leading else print(group.receive().operation)
group.least(0)
assert gloo_threads() > 0
if not group.is_leading:
    assert group.receive().operation is Operation.STOP
group.close()
print("left:", gloo_threads())
"""


def test_no_thread_of_the_collectives_is_left() -> None:
    ranks = start_ranks(["-c", _PROGRAM])
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert all("left: 0" in output for output in outputs), outputs
