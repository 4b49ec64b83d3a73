"""gpu_worker: forward passes over a model that several processes share.

`ShardRunner` computes with this rank's part, and with all other ranks wherever a layer needs the sum of all: after
attention, after the feed-forward part, and where ids become vectors. Every rank must run the same steps in the same
order. `LeadingRunner` is that of rank 0: it says so to the others before each thing it does.

With one rank nothing of this is in the way: products are wrapped when the runner is made, not asked at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.decode_graphs import DecodeGraphs, GraphLimits, States
from services.gpu_worker.graph_device import GraphDevice
from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.operators import Operators
from services.gpu_worker.models.projection import Projection
from services.gpu_worker.parallel.commands import Command, Operation, packed, step_sizes
from services.gpu_worker.parallel.group import RankGroup
from services.gpu_worker.parallel.shards import Range, split_vocabulary
from services.gpu_worker.step_inputs import StepInputs

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class SummedProjection:
    """A `Projection` of which each rank has some columns: the sum over all ranks is the product."""

    own: Projection
    group: RankGroup

    @property
    def num_bytes(self) -> int:
        """See `Projection.num_bytes`."""
        return self.own.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection.__call__`; x has this rank's columns."""
        product = self.own(x)
        self.group.add_up(product)
        return product


@dataclass(frozen=True, slots=True)
class CollectedProjection:
    """A `Projection` of which each rank has some rows; rank 0 gets the whole product, the others have their own part.

    Attributes:
        own: this rank's rows.
        group: whose ranks have the others.
        widths: rows of each rank.
    """

    own: Projection
    group: RankGroup
    widths: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """See `Projection.num_bytes`."""
        return self.own.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection.__call__`, on rank 0."""
        own = self.own(x)  # [num_tokens, own width]
        widest = max(self.widths)
        parts = self.group.collect(own if own.shape[1] == widest else functional.pad(own, (0, widest - own.shape[1])))
        if not parts:
            return own
        return torch.cat([part[:, :width] for part, width in zip(parts, self.widths, strict=True)], dim=1)


@dataclass(frozen=True, slots=True)
class SharedEmbedding:
    """Looks ids up in an embedding of which each rank has the rows `[vocabulary.first, vocabulary.end)`."""

    vocabulary: Range
    group: RankGroup

    def __call__(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """[num_tokens, hidden_size] from ids [num_tokens] and this rank's rows."""
        own = ids - self.vocabulary.first
        is_elsewhere = (own < 0) | (own >= len(self.vocabulary))
        vectors = functional.embedding(own.masked_fill(is_elsewhere, 0), embedding)
        vectors.masked_fill_(is_elsewhere[:, None], 0)
        self.group.add_up(vectors)  # one of them is not zero: nothing is rounded
        return vectors


class ShardRunner(ModelRunner):
    """A `ModelRunner` over one rank's part of a model."""

    def __init__(
        self,
        group: RankGroup,
        config: ModelConfig,
        weights: DecoderWeights[Projection],
        kv_cache: KvCache,
        attention: AttentionBackend,
        operators: Operators | None = None,
    ) -> None:
        """See `ModelRunner`: `config` and `weights` are this rank's (see `shards.Shard`), the vocabulary is whole."""
        size = group.place.size
        vocabularies = [split_vocabulary(config.vocab_size, rank, size) for rank in range(size)]
        joined = _joined(weights, group, tuple(len(each) for each in vocabularies))
        super().__init__(config, joined, kv_cache, attention, operators)
        self._group = group
        self._decoder = replace(self._decoder, embed=SharedEmbedding(vocabularies[group.place.rank], group))


def _joined(
    weights: DecoderWeights[Projection], group: RankGroup, widths: tuple[int, ...]
) -> DecoderWeights[Projection]:
    layers = tuple(
        replace(
            layer,
            output=SummedProjection(layer.output, group),
            down=None if layer.down is None else SummedProjection(layer.down, group),
        )
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head=CollectedProjection(weights.head, group, widths))


class LeadingRunner(ShardRunner):
    """The `ShardRunner` of rank 0. An error in what all ranks do together cannot be mended: `RankLostError`."""

    @torch.inference_mode()
    def states(self, inputs: StepInputs) -> States:
        """See `ModelRunner.states`, which launches what is not recorded by way of `hidden`."""
        if not self.is_recorded(inputs):
            return super().states(inputs)
        return self._together(lambda: self._step(Operation.REPLAY, inputs, super(LeadingRunner, self).states))

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs) -> Tensor:
        """See `ModelRunner.hidden`."""
        return self._together(lambda: self._step(Operation.LAUNCH, inputs, super(LeadingRunner, self).hidden))

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        """See `ModelRunner.logits`."""

        def run() -> Tensor:
            self._group.send(Command(Operation.LOGITS, [len(normed)]))
            self._group.share(normed)
            return super(LeadingRunner, self).logits(normed)

        return self._together(run)

    def zero_pages(self, page_ids: Sequence[int]) -> None:
        """See `ModelRunner.zero_pages`."""
        self._together(lambda: self._group.send(Command(Operation.ZERO_PAGES, page_ids)))
        super().zero_pages(page_ids)

    def zero_slots(self, slots: Sequence[int]) -> None:
        """See `ModelRunner.zero_slots`."""
        self._together(lambda: self._group.send(Command(Operation.ZERO_SLOTS, slots)))
        super().zero_slots(slots)

    @torch.inference_mode()
    def record_decode(self, limits: GraphLimits, device: GraphDevice, pump: Callable[[int], None]) -> DecodeGraphs:
        """See `ModelRunner.record_decode`."""
        self._together(lambda: self._group.send(Command(Operation.RECORD_DECODE, [limits.max_rows, limits.max_length])))
        return super().record_decode(limits, device, pump)

    def _step(self, operation: Operation, inputs: StepInputs, run: Callable[[StepInputs], _Result]) -> _Result:
        self._group.send(Command(operation, step_sizes(inputs)))
        self._group.share(packed(inputs))
        return run(inputs)

    def _together(self, run: Callable[[], _Result]) -> _Result:
        try:
            return run()
        except Exception as error:
            raise self._group.lost(error) from error
