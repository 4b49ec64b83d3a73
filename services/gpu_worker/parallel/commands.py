"""gpu_worker: what rank 0 tells the other ranks of its group to do next: an operation and some whole numbers.

A command says what all ranks do and in which shapes; the tensors themselves follow as collectives. It is a frame of a
fixed size, which nearly every command fits, and where it does not, another of as many numbers as are left:

    [ operation, count, number, number, ... ]   [ ... numbers ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from services.gpu_worker.step_inputs import StepInputs

HEAD_NUMBERS = 1024
_IN_HEAD = HEAD_NUMBERS - 2


class Operation(IntEnum):
    """What to do."""

    LAUNCH = 1
    """A step; the sizes of its inputs."""
    REPLAY = 2
    """A step that was recorded; likewise."""
    LOGITS = 3
    """Logits of so many hidden states."""
    ZERO_PAGES = 4
    """These pages."""
    ZERO_SLOTS = 5
    """These slots."""
    MAKE_POOL = 6
    """A KV pool; most tokens of a request, and the bytes that a step takes on rank 0."""
    RECORD_DECODE = 7
    """Decode steps of up to so many rows and so many tokens in a row."""
    SERVE = 8
    """The start is over."""
    STOP = 9
    """Nothing comes after this."""


@dataclass(frozen=True, slots=True)
class Command:
    """An operation and its numbers, int64 each."""

    operation: Operation
    numbers: Sequence[int] = ()


def first_frame(command: Command) -> Tensor:
    """[HEAD_NUMBERS] int64 on the CPU."""
    numbers = [command.operation, len(command.numbers), *command.numbers[:_IN_HEAD]]
    frame = torch.zeros(HEAD_NUMBERS, dtype=torch.int64)
    frame[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    return frame


def rest_of(command: Command | Tensor) -> Tensor | None:
    """What the first frame has no room for, of a first frame memory for that; None if there is no more."""
    if isinstance(command, Command):
        rest = command.numbers[_IN_HEAD:]
        return torch.tensor(rest, dtype=torch.int64) if rest else None
    num_left = int(command[1]) - _IN_HEAD
    return torch.empty(num_left, dtype=torch.int64) if num_left > 0 else None


def whole_command(first: Tensor, rest: Tensor | None) -> Command:
    """The command of two frames."""
    operation, count, *numbers = first.tolist()
    return Command(Operation(operation), [*numbers[:count], *([] if rest is None else rest.tolist())])


def step_sizes(inputs: StepInputs) -> list[int]:
    """What must be known of a step on the host: `[rows, width of the page table, samples, lengths, contexts]`."""
    table_width, num_samples = inputs.page_table.shape[1], len(inputs.sample_indices)
    return [inputs.num_rows, table_width, num_samples, *inputs.query_lengths, *inputs.context_lengths]


def packed(inputs: StepInputs) -> Tensor:
    """What must be known of a step on the device, in one: [n] int64."""
    return torch.cat(
        (
            inputs.input_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.sample_indices,
            inputs.page_table.reshape(-1),
        )
    )


def packed_length(sizes: Sequence[int]) -> int:
    """How long `packed` is of a step of these `step_sizes`."""
    num_rows, table_width, num_samples = sizes[:3]
    return 3 * sum(sizes[3 : 3 + num_rows]) + num_samples + num_rows * table_width


def unpacked(sizes: Sequence[int], tensor: Tensor) -> StepInputs:
    """The step of these sizes, from `packed`."""
    num_rows, table_width, num_samples = sizes[:3]
    query_lengths = tuple(sizes[3 : 3 + num_rows])
    num_tokens = sum(query_lengths)
    lengths = [num_tokens, num_tokens, num_tokens, num_samples, num_rows * table_width]
    input_ids, positions, slots, samples, table = torch.split(tensor, lengths)
    return StepInputs(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slots,
        page_table=table.view(num_rows, table_width),
        query_lengths=query_lengths,
        context_lengths=tuple(sizes[3 + num_rows :]),
        sample_indices=samples,
    )
