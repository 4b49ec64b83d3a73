"""gpu_worker: records the loops that a piece of work consists of, to run them without the program that made them.

As with CUDA graphs (see `graph_device`) what is recorded reads and writes the very memory that it was recorded with.
Everything that computes must be a loop: an operator of torch would not be there when the loops are run again, so one
that does more than make a tensor or a view is refused.
"""

from __future__ import annotations

import math
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.gpu_worker.cpu_loops.program_loop import PROGRAM
from services.gpu_worker.cpu_loops.team import Team

_Result = TypeVar("_Result")
_Block = npt.NDArray[np.uint8]
_ALIGNMENT = 64


class NotRecordableError(Exception):
    """The work is not made of loops alone."""


class Recording:
    """Recorded loops and the memory they work in. Made by `record`."""

    def __init__(self, team: Team, loops: list[tuple[int, array[int]]], kept: list[object]) -> None:
        self._team = team
        self._kept = (loops, kept)
        self._num_threads = torch.get_num_threads()
        self._arrived = torch.zeros(1, dtype=torch.int64)
        lines = [number for loop, arguments in loops for number in (loop, arguments.buffer_info()[0])]
        self._lines = array("q", lines)
        self._arguments = array("q", (self._lines.buffer_info()[0], len(loops), self._arrived.data_ptr()))

    def replay(self) -> None:
        """Runs the loops once more, on as many threads as when they were recorded."""
        self._arrived.zero_()
        self._team.run_on(self._num_threads, PROGRAM, self._arguments)


def record(team: Team, run: Callable[[], _Result]) -> tuple[Recording, _Result]:
    """Records a piece of work without doing it.

    Args:
        team: runs its loops.
        run: the work, called twice: what is set up at a first time need not be loops. It is kept, and what it reads
            with it, which must stay where it is.

    Returns:
        The recording, and what `run` has returned: tensors that each replay fills anew.

    Raises:
        NotRecordableError: it computes something that is not a loop; says what.
    """
    with team.listen():
        run()
    memory = _Memory()
    with team.listen() as heard, _LoopsOnly(memory):
        result = run()
    return Recording(team, heard.loops, [memory, heard.scratches, run, result]), result


class _Memory:
    """Blocks for what is computed on the way: one that no tensor looks into any more is lent again.

    The loops run in the order in which they were recorded, so what they hand over in a block is read by then.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)

    def empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        free = self._free[num_bytes]
        block = free.pop() if free else self._new_block(num_bytes)
        lent = block[:]  # an object of its own, which torch keeps as long as a tensor looks into it
        weakref.finalize(lent, free.append, block)
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _new_block(self, num_bytes: int) -> _Block:
        memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        block = memory[start : start + num_bytes]
        self._blocks.append(block)
        return block


class _LoopsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered tensors can be made and viewed, and nothing else."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would load its compiler for that, nearly three seconds of every start. Nothing here is compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._memory.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func.is_view:
            return func(*args, **kwargs)
        raise NotRecordableError(f"{func} is not a loop")
