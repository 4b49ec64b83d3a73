"""gpu_worker: what a step asks of the machine at least: bytes to move, operations to do. Pure.

Counted is what no implementation can leave out: the weights once, in the form that so many rows go through, of experts
as many as so many tokens choose if all are chosen as often; the keys and values that each row attends to, once a row;
keys and values written; lines of the embedding; the logits. What lies between the operators of a layer is not: it fits
in caches, or could. Multiplying and adding are two operations; those of norms, rotation and softmax are too few to
count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, mul

from services.gpu_worker.models.config import ExpertConfig, ModelConfig
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.projection import Projection, ReadsByRows

_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step.

    Attributes:
        is_decode: whether every row has one new token, proposals apart; else it is a prefill, decoding rows beside it
            or not.
        num_tokens: new tokens, proposals among them.
        num_bytes: moved between memory and processor.
        num_operations: additions and multiplications.
    """

    is_decode: bool
    num_tokens: int
    num_bytes: int
    num_operations: int


class ModelCost:
    """The costs of one model's steps. Some microseconds for a step: only sums over its rows."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights[Projection], kv_bytes_per_token: int) -> None:
        """Adds up what does not depend on the step.

        Args:
            config: the model.
            weights: in the forms that run.
            kv_bytes_per_token: of all layers, in the dtype of the pool.
        """
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        of_attention = config.hidden_size * (2 * queries + 2 * keys)
        of_mlps = sum(3 * config.hidden_size * width for width in _widths(config))
        self._operations_per_token = 2 * (config.num_layers * of_attention + of_mlps)
        self._operations_per_logits = 2 * config.vocab_size * config.hidden_size
        self._operations_per_pair = 4 * queries  # of one layer: a new token and a token that it attends to
        self._layers = _Reads([each for layer in weights.layers for each in layer.projections])
        self._experts = config.experts
        self._expert_bytes = sum(layer.experts.num_bytes for layer in weights.layers if layer.experts is not None)
        self._head = _Reads([weights.head])
        self._norm_bytes = weights.final_norm.nbytes + sum(layer.norm_bytes for layer in weights.layers)
        self._embedding_bytes = config.hidden_size * weights.embedding.element_size()
        self._logit_bytes = _LOGIT_BYTES * config.vocab_size
        self._kv_bytes_per_token = kv_bytes_per_token
        self._kv_bytes_of_layer = kv_bytes_per_token // config.num_layers
        self._windows = tuple(Counter(config.windows).items())
        self._has_windows = any(window is not None for window in config.windows)

    def of_step(self, starts: Sequence[int], counts: Sequence[int], num_proposed: int = 0) -> StepCost:
        """The cost of a step whose rows compute `counts` new tokens from the positions `starts` on: num_rows each.

        `num_proposed` of them are proposals, behind each of which a token is sampled like behind a row's last one.
        """
        num_tokens, num_rows = sum(counts), len(counts)
        num_logits = num_rows + num_proposed
        is_decode = num_tokens - num_proposed == num_rows
        longest = max(map(add, starts, counts)) if self._has_windows else 0
        num_bytes = self.weight_bytes(num_tokens, num_logits)
        num_bytes += num_tokens * (self._embedding_bytes + self._kv_bytes_per_token) + num_logits * self._logit_bytes
        num_operations = num_tokens * self._operations_per_token + num_logits * self._operations_per_logits
        for window, num_layers in self._windows:
            if window is None or window >= longest:
                num_read, num_pairs = _attended(starts, counts)
            else:
                num_read, num_pairs = _attended_within(starts, counts, window)
            num_bytes += num_layers * self._kv_bytes_of_layer * num_read
            num_operations += num_layers * self._operations_per_pair * num_pairs
        return StepCost(is_decode, num_tokens, num_bytes, num_operations)

    def weight_bytes(self, num_tokens: int, num_logits: int) -> int:
        """Bytes of weights that a step of so many tokens and lines of logits reads: layers, norms, head."""
        experts = int(self._expert_bytes * _share_of_experts(self._experts, num_tokens))
        return self._layers.num_bytes(num_tokens) + experts + self._norm_bytes + self._head.num_bytes(num_logits)


class _Reads:
    """What some projections read, together."""

    def __init__(self, projections: Sequence[Projection]) -> None:
        self._by_rows = [each for each in projections if isinstance(each, ReadsByRows)]
        self._always = sum(each.num_bytes for each in projections if not isinstance(each, ReadsByRows))
        self._known: dict[int, int] = {}  # no more of them than a step can have tokens

    def num_bytes(self, num_rows: int) -> int:
        found = self._known.get(num_rows)
        if found is None:
            found = self._known[num_rows] = self._always + sum(each.bytes_read(num_rows) for each in self._by_rows)
        return found


def _widths(config: ModelConfig) -> list[int]:
    """For each layer, how wide what a token goes through is between the two products of its feed-forward part."""
    experts = config.experts
    if experts is None:
        return [config.intermediate_size] * config.num_layers
    of_experts = experts.num_chosen * experts.intermediate_size
    return [of_experts if has_experts else config.intermediate_size for has_experts in experts.in_layers]


def _share_of_experts(experts: ExpertConfig | None, num_tokens: int) -> float:
    """The share of a layer's experts that at least one of so many tokens is expected to choose."""
    return 0.0 if experts is None else 1 - (1 - experts.num_chosen / experts.num_experts) ** num_tokens


def _attended(starts: Sequence[int], counts: Sequence[int]) -> tuple[int, int]:
    """In a layer: tokens whose keys and values are read, and pairs of a new token and one that it attends to.

    A new token attends to itself and to all before it. Sums of whole columns: rows are many and the time is short.
    """
    num_tokens = sum(counts)
    num_read = sum(starts) + num_tokens
    if num_tokens == len(counts):  # one new token each
        return num_read, num_read
    return num_read, sum(map(mul, starts, counts)) + (sum(map(mul, counts, counts)) + num_tokens) // 2


def _attended_within(starts: Sequence[int], counts: Sequence[int], window: int) -> tuple[int, int]:
    """Likewise, where a token sees itself and at most the `window - 1` tokens before it."""
    rows = [(start, start + count) for start, count in zip(starts, counts, strict=True)]
    num_read = sum(end - max(0, start + 1 - window) for start, end in rows)
    return num_read, sum(_pairs_before(end, window) - _pairs_before(start, window) for start, end in rows)


def _pairs_before(end: int, window: int) -> int:
    """The pairs of all tokens at positions [0, end)."""
    within = min(end, window)
    return within * (within + 1) // 2 + (end - within) * window
