"""gpu_worker: one forward pass of a model over the paged pool.

Joins the four things that a step needs: the configuration, the weights, the pool and an attention backend. Owns none of
a request's state and never samples: it turns `StepInputs` into hidden states, and these into logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.gpu_worker.attention.backend import AttentionBackend, CapturableAttention
from services.gpu_worker.decode_graphs import DecodeGraphs, GraphLimits, States, record_decode
from services.gpu_worker.graph_device import GraphDevice
from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.decoder import Decoder
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.operators import Operators, PlainOperators
from services.gpu_worker.models.projection import Projection
from services.gpu_worker.recorded_layers import RecordedLayers, record_layers
from services.gpu_worker.step_inputs import StepInputs


class ModelRunner:
    """Runs steps. Cheap to make: measuring may use one with an empty pool before the real pool is allocated."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights[Projection],
        kv_cache: KvCache,
        attention: AttentionBackend,
        operators: Operators | None = None,
    ) -> None:
        """Binds the parts together.

        Args:
            config: the model's configuration.
            weights: its weights, on the device of the pool.
            kv_cache: the pool that the step's pages live in.
            attention: how attention is computed.
            operators: how the operators between products and attention are; None: the plain way.
        """
        self.config = config
        self.kv_cache = kv_cache
        operators = operators or PlainOperators()
        # The plain ones would round after each of their steps.
        rounds_from = None if isinstance(operators, PlainOperators) else weights.rounds_from
        self._decoder = Decoder(config, weights, operators, rounds_from=rounds_from)
        self._attention = attention
        self._graphs: DecodeGraphs | None = None
        self._recorded: RecordedLayers | None = None

    @property
    def can_record_decode(self) -> bool:
        """Whether attention and weights allow it."""
        return isinstance(self._attention, CapturableAttention) and not self._decoder.weights.is_read_on_host

    @torch.inference_mode()
    def record_decode(self, limits: GraphLimits, device: GraphDevice, pump: Callable[[int], None]) -> DecodeGraphs:
        """Records decode steps, which `states` replays from now on; see `decode_graphs.record_decode`.

        Raises:
            TypeError: the attention reads lengths on the host, or so are the experts' numbers of tokens.
        """
        attention = self._attention
        if not isinstance(attention, CapturableAttention):
            raise TypeError(f"{type(attention).__name__} cannot be recorded")
        if self._decoder.weights.is_read_on_host:
            raise TypeError("experts that are multiplied one after another cannot be recorded")

        def decode(inputs: StepInputs) -> States:
            step = attention.begin_decode(inputs, self.kv_cache)
            hidden = self._decoder.layers(inputs, step)
            return hidden, self._decoder.final_norm(hidden, inputs.sample_indices)

        self._graphs = record_decode(decode, self.kv_cache, limits, device, pump)
        return self._graphs

    @torch.inference_mode()
    def record_layers(self, limits: GraphLimits, pump: Callable[[], None]) -> RecordedLayers | None:
        """On a CPU: records the layers of decode steps, which `hidden` replays from now on; None: it cannot be done."""
        self._recorded = record_layers(self._decoder, self._attention, self.kv_cache, limits, pump)
        return self._recorded

    def is_recorded(self, inputs: StepInputs) -> bool:
        """Whether `states` will replay this step."""
        return self._graphs is not None and self._graphs.covers(inputs)

    @torch.inference_mode()
    def states(self, inputs: StepInputs) -> States:
        """Computes a step: hidden states of its new tokens, and those at `sample_indices` after the final norm.

        A step that was recorded is replayed; its results are overwritten by the next one, so use them before.
        """
        if self._graphs is not None and self._graphs.covers(inputs):
            return self._graphs.run(inputs)
        hidden = self.hidden(inputs)
        return hidden, self.normed(hidden, inputs.sample_indices)

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs) -> Tensor:
        """Computes the new tokens of a step; their keys and values are in the pool afterwards.

        Returns:
            [num_tokens, hidden_size] in the model's dtype, before the final norm.
        """
        if self._recorded is not None and self._recorded.covers(inputs):
            return self._recorded.run(inputs)
        attention = self._attention.begin_step(inputs, self.kv_cache)
        return self._decoder.layers(inputs, attention)

    @torch.inference_mode()
    def normed(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Hidden states of some tokens ([n] int64) after the final norm: [n, hidden_size]."""
        return self._decoder.final_norm(hidden, indices)

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        """[n, vocab_size] float32 from [n, hidden_size]; the caller may change them."""
        return self._decoder.logits(normed)

    def zero_pages(self, page_ids: Sequence[int]) -> None:
        """See `KvCache.zero_pages`."""
        self.kv_cache.zero_pages(page_ids)

    def zero_slots(self, slots: Sequence[int]) -> None:
        """See `KvCache.zero_slots`."""
        self.kv_cache.zero_slots(slots)

    def forward(self, inputs: StepInputs) -> Tensor:
        """A whole pass: [num_sampling_rows, vocab_size] float32, the logits at `inputs.sample_indices`."""
        return self.logits(self.states(inputs)[1])

    def dummy_inputs(self, num_tokens: int, num_rows: int, context: int = 0) -> StepInputs:
        """A step of `num_tokens` tokens in `num_rows` rows that touches only the dummy page, to measure or to warm up.

        The tokens are spread over the rows and every row samples: the largest step that both limits allow. Each row
        has `context` tokens before them.
        """
        if not 1 <= num_rows <= num_tokens:
            raise ValueError(f"{num_tokens} tokens cannot be spread over {num_rows} rows")
        device = self.kv_cache.keys.device
        page_size = self.kv_cache.shape.page_size
        lengths = tuple(len(range(row, num_tokens, num_rows)) for row in range(num_rows))
        ends = tuple(context + length for length in lengths)
        positions = torch.cat([torch.arange(context, end, device=device) for end in ends])
        max_pages = -(-max(ends) // page_size)
        dummy = self.kv_cache.dummy_page_id
        return StepInputs(
            input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            positions=positions,
            slot_mapping=dummy * page_size + positions % page_size,
            page_table=torch.full((num_rows, max_pages), dummy, dtype=torch.int64, device=device),
            query_lengths=lengths,
            context_lengths=ends,
            sample_indices=torch.tensor(lengths, device=device).cumsum(0) - 1,
        )
