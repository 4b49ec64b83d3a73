"""gpu_worker: the layers of a decode step on a CPU, recorded once for each number of rows and replayed from then on.

What a step of few rows computes between two products takes no longer than the program that asks for it. Recorded, it is
one call (see `cpu_loops.recording`). Only steps whose every operator is a compiled loop can be recorded: few rows, in
fast numerics; all others run as they are written. A row with a few new tokens is replayed as so many rows.

Owns the memory that recordings read their inputs from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from services.gpu_worker.attention.backend import AttentionBackend, StepAttention
from services.gpu_worker.attention.paged_cpu import FEW_TOKENS
from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.decode_graphs import GraphLimits
from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.models.decoder import Decoder
from services.gpu_worker.products.tiles import FEW_ROWS
from services.gpu_worker.static_inputs import StaticInputs
from services.gpu_worker.step_inputs import StepInputs, one_row_a_token

if TYPE_CHECKING:
    from services.gpu_worker.cpu_loops.recording import Recording

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, FEW_ROWS)
"""Rows of the steps that are recorded: products take rows by four. Others are padded, as in `decode_graphs`."""


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What recordings of all sizes read beside `StaticInputs`: the new tokens' vectors, and their rotation.

    Attributes:
        hidden: [num_tokens, hidden_size]; sums take their place.
        cos: see `rotary_cos_sin`.
        sin: likewise.
    """

    hidden: Tensor
    cos: Tensor
    sin: Tensor

    def of(self, num_rows: int) -> _Buffers:
        """The first lines."""
        return _Buffers(self.hidden[:num_rows], self.cos[:num_rows], self.sin[:num_rows])


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The layers for one number of rows.

    Attributes:
        num_rows: how many.
        recording: what is replayed.
        results: where it leaves what `Decoder.pass_layers` returns.
    """

    num_rows: int
    recording: Recording
    results: tuple[Tensor, Tensor | None]


class RecordedLayers:
    """Recordings of a model's layers over one pool. Made by `record_layers`."""

    def __init__(self, decoder: Decoder, static: StaticInputs, buffers: _Buffers, steps: list[_Recorded]) -> None:
        """Takes the recordings, fewest rows first."""
        self._decoder = decoder
        self._static = static
        self._buffers = buffers
        self._steps = steps

    @property
    def most_rows(self) -> int:
        """New tokens of the largest step that is replayed."""
        return self._steps[-1].num_rows

    def covers(self, inputs: StepInputs) -> bool:
        """Whether a step can be replayed: few new tokens in each row, not too many together."""
        return inputs.num_tokens <= self.most_rows and max(inputs.query_lengths) <= FEW_TOKENS

    def run(self, inputs: StepInputs) -> Tensor:
        """What `Decoder.layers` returns for a step that is covered."""
        if inputs.num_tokens > inputs.num_rows:
            inputs = one_row_a_token(inputs)
        num_rows = inputs.num_rows
        step = next(step for step in self._steps if step.num_rows >= num_rows)
        self._static.fill(inputs, step.num_rows)
        given = self._buffers.of(num_rows)
        given.hidden.copy_(self._decoder.embedded(inputs))
        cos, sin = self._decoder.rotation(inputs)
        given.cos.copy_(cos)
        given.sin.copy_(sin)
        self._buffers.hidden[num_rows : step.num_rows].zero_()  # padding would add to its sums for ever
        step.recording.replay()
        hidden, added = (result if result is None else result[:num_rows] for result in step.results)
        assert hidden is not None
        return hidden.clone() if added is None else hidden + added


def record_layers(
    decoder: Decoder,
    attention: AttentionBackend,
    kv_cache: KvCache,
    limits: GraphLimits,
    pump: Callable[[], None],
) -> RecordedLayers | None:
    """Records steps of more and more rows, as long as they are made of loops alone; None if not even the first is.

    Args:
        decoder: the model, on a CPU.
        attention: how attention is computed.
        kv_cache: the pool that steps will run over.
        limits: what steps there will be; none may be longer.
        pump: called after each recording, to say that this process lives.
    """
    if loops_problem():
        return None
    from services.gpu_worker.cpu_loops.recording import NotRecordableError, record  # only where there is numba
    from services.gpu_worker.cpu_loops.team import TEAM

    assert TEAM is not None
    largest = min(limits.max_rows * FEW_TOKENS, SIZES[-1])
    sizes = [*(size for size in SIZES if size < largest), largest]
    static = StaticInputs(kv_cache, sizes[-1], limits.max_length)
    inputs = static.of(sizes[-1])
    buffers = _Buffers(decoder.embedded(inputs), *(part.clone() for part in decoder.rotation(inputs)))
    steps: list[_Recorded] = []
    for size in sizes:
        held, step = buffers.of(size), attention.begin_step(static.of(size), kv_cache)

        def run(held: _Buffers = held, step: StepAttention = step) -> tuple[Tensor, Tensor | None]:
            return decoder.pass_layers(held.hidden, (held.cos, held.sin), step)

        try:
            steps.append(_Recorded(size, *record(TEAM, run)))
        except NotRecordableError:
            break
        pump()
    return RecordedLayers(decoder, static, buffers, steps) if steps else None
