"""gpu_worker: decode steps that are replayed instead of launched.

Steps in which every row has one new token are recorded once for each of a ladder of batch sizes. A step of other size
is padded to the next one:

    rows of the step   [ r0 ][ r1 ][ r2 ]
    recorded for four  [ r0 ][ r1 ][ r2 ][ padding ]     writes to the dummy page, attends to it alone

Owns the memory that recordings leave their results in. Whatever is not covered (a chunk of a
prompt among the rows, more rows than were recorded) is for the caller to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.gpu_worker.graph_device import GraphDevice, Recording
from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.static_inputs import StaticInputs
from services.gpu_worker.step_inputs import StepInputs

LARGEST_BATCH = 512
"""Larger steps have so much to compute that launching them costs nothing."""

States = tuple[Tensor, Tensor]
"""Hidden states of all new tokens, and of the rows' last ones after the final norm: [n, hidden_size] each."""


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What is recorded: steps of up to `max_rows` rows, none of them longer than `max_length` tokens."""

    max_rows: int
    max_length: int


def batch_sizes(max_rows: int) -> tuple[int, ...]:
    """The ladder: 1, 2, 4, then every 8 up to 256, every 32 from there; the last is the largest step there can be."""
    largest = min(max_rows, LARGEST_BATCH)
    steps = [1, 2, 4, *range(8, 257, 8), *range(288, LARGEST_BATCH + 1, 32)]
    return (*(size for size in steps if size < largest), largest)


class DecodeGraphs:
    """Recordings of one model's decode over one pool. Made by `record_decode`."""

    def __init__(self, inputs: StaticInputs, results: States, recordings: dict[int, Recording]) -> None:
        self._inputs = inputs
        self._results = results
        self._recordings = recordings
        self._sizes = sorted(recordings)

    @property
    def sizes(self) -> Sequence[int]:
        """Rows of each recording, smallest first."""
        return self._sizes

    def covers(self, inputs: StepInputs) -> bool:
        """Whether a step can be replayed: one new token in each row, all of them asked for, not too many."""
        return inputs.num_tokens == inputs.num_rows == len(inputs.sample_indices) <= self._sizes[-1]

    def run(self, inputs: StepInputs) -> States:
        """Replays a step that is covered: [num_rows, hidden_size] twice, valid until the next step is replayed."""
        num_rows = inputs.num_rows
        size = next(size for size in self._sizes if size >= num_rows)
        self._inputs.fill(inputs, size)
        self._recordings[size].replay()
        hidden, normed = self._results
        return hidden[:num_rows], normed[:num_rows]


def record_decode(
    decode: Callable[[StepInputs], States],
    kv_cache: KvCache,
    limits: GraphLimits,
    device: GraphDevice,
    pump: Callable[[int], None],
) -> DecodeGraphs:
    """Records the whole ladder, largest first.

    Args:
        decode: computes a step with one new token in each row, reading lengths and pages on the device only.
        kv_cache: the pool that steps will run over; only its dummy page is written here.
        limits: what steps there will be.
        device: records.
        pump: called after each recording with its size, to say that this process lives.
    """
    sizes = batch_sizes(limits.max_rows)
    static = StaticInputs(kv_cache, sizes[-1], limits.max_length)
    hidden, normed = (torch.empty_like(states) for states in decode(static.of(sizes[-1])))
    recordings: dict[int, Recording] = {}
    for size in reversed(sizes):
        inputs = static.of(size)

        def run(inputs: StepInputs = inputs, size: int = size) -> None:
            states = decode(inputs)
            hidden[:size].copy_(states[0])
            normed[:size].copy_(states[1])

        recordings[size] = device.record(run)
        pump(size)
    return DecodeGraphs(static, (hidden, normed), recordings)
