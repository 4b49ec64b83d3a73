"""gpu_worker: which part of a model each rank of a group holds. Pure: it follows from the configuration alone.

    rank                    0             1                     of 3 key/value heads, 9 query heads, 1536 columns
    key/value heads       [ 0  1 ]      [ 2 ]                   whole heads; if it is uneven the first have more
    query heads           [ 0 .. 5 ]    [ 6 .. 8 ]              those that read these
    feed-forward columns  [ 0 .. 767 ]  [ 768 .. 1535 ]
    vocabulary            [ first half ][ second half ]         of embedding and head

Query, key, value, gate and up matrices, embedding and head are split by rows; the output and down matrices, which read
what these gave, by columns: their products are summed over the ranks. More ranks than key/value heads share a head:
each holds all of it, and some of its query heads. Norms are everywhere; a bias of what is summed is added by rank 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.weight_sources.source import WHOLE, Part
from services.model_files.rank_limits import sharing_problem
from services.runtime.service import StartError

_VOCABULARY_UNIT = 64
_COLUMN_UNITS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
_UNEVEN_UNIT = 32  # weights that share a scale in 4-bit formats
_IN_LAYER = re.compile(r"model\.layers\.\d+\.(.+)")


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers [first, end)."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds.

    Attributes:
        rank: which of `size` ranks.
        size: ranks that share the model, >= 1.
        config: the model with the heads and columns of this rank, and the whole vocabulary.
        layout: the same with this rank's part of the vocabulary: what its weights are allocated by.
        queries, kv_heads, columns, vocabulary: its parts.
    """

    rank: int
    size: int
    config: ModelConfig
    layout: ModelConfig
    queries: Range
    kv_heads: Range
    columns: Range
    vocabulary: Range

    def part(self, name: str) -> Part | None:
        """Where this rank's part of a tensor begins; None: it holds zeros in its place.

        Raises:
            StartError: a tensor that no rule is known for.
        """
        if self.size == 1:
            return WHOLE
        head_dim = self.config.head_dim
        match _name_in_layer(name):
            case "model.embed_tokens.weight" | "lm_head.weight":
                return Part(first_row=self.vocabulary.first)
            case "self_attn.q_proj.weight" | "self_attn.q_proj.bias":
                return Part(first_row=self.queries.first * head_dim)
            case (
                "self_attn.k_proj.weight"
                | "self_attn.k_proj.bias"
                | "self_attn.v_proj.weight"
                | "self_attn.v_proj.bias"
            ):
                return Part(first_row=self.kv_heads.first * head_dim)
            case "self_attn.o_proj.weight":
                return Part(first_column=self.queries.first * head_dim)
            case "mlp.gate_proj.weight" | "mlp.gate_proj.bias" | "mlp.up_proj.weight" | "mlp.up_proj.bias":
                return Part(first_row=self.columns.first)
            case "mlp.down_proj.weight":
                return Part(first_column=self.columns.first)
            case "self_attn.o_proj.bias" | "mlp.down_proj.bias":
                return WHOLE if self.rank == 0 else None
            case norm if norm.endswith("norm.weight"):
                return WHOLE
        raise StartError(f"--tp-size {self.size}: there is no rule how ranks share the tensor {name}")


def undivided(config: ModelConfig) -> Shard:
    """The whole model, held by one."""
    return split_model(config, 0, 1)


def split_model(config: ModelConfig, rank: int, size: int) -> Shard:
    """What a rank holds of a model.

    Args:
        config: of the whole model.
        rank: in [0, size).
        size: ranks that share it, >= 1.

    Raises:
        StartError: there are more ranks than heads or columns to share, or experts; names the field.
    """
    if size > 1 and config.experts is not None:
        raise StartError(f"--tp-size {size}: a {config.model_type} model has experts, which ranks cannot share yet")
    dealt_out = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    if problem := sharing_problem(dealt_out, size):
        raise StartError(problem)
    kv_heads, queries = _split_heads(config, rank, size)
    columns = _split_columns(config.intermediate_size, rank, size)
    vocabulary = split_vocabulary(config.vocab_size, rank, size)
    own = replace(config, num_heads=len(queries), num_kv_heads=len(kv_heads), intermediate_size=len(columns))
    layout = replace(own, vocab_size=len(vocabulary))
    return Shard(rank, size, own, layout, queries, kv_heads, columns, vocabulary)


def split_vocabulary(vocab_size: int, rank: int, size: int) -> Range:
    """The ids whose rows of embedding and head a rank holds; there are as many ids as ranks at least."""
    unit = _VOCABULARY_UNIT if vocab_size >= _VOCABULARY_UNIT * size else 1
    units = _share(-(-vocab_size // unit), rank, size)
    return Range(units.first * unit, min(units.end * unit, vocab_size))


def _split_heads(config: ModelConfig, rank: int, size: int) -> tuple[Range, Range]:
    """Key/value heads, and the query heads that read them."""
    num_kv_heads = config.num_kv_heads
    group = config.num_heads // num_kv_heads
    if size <= num_kv_heads:
        kv_heads = _share(num_kv_heads, rank, size)
        return kv_heads, Range(kv_heads.first * group, kv_heads.end * group)
    head = next(head for head in range(num_kv_heads) if rank < _share(size, head, num_kv_heads).end)
    ranks = _share(size, head, num_kv_heads)  # those that share this head
    queries = _share(group, rank - ranks.first, len(ranks))
    return Range(head, head + 1), Range(head * group + queries.first, head * group + queries.end)


def _split_columns(num_columns: int, rank: int, size: int) -> Range:
    """Evenly where a unit allows it; the larger the unit the better for kernels and blocks of quantized weights."""
    unit = next((unit for unit in _COLUMN_UNITS if num_columns % (unit * size) == 0), None)
    if unit is None:
        is_enough = num_columns % _UNEVEN_UNIT == 0 and num_columns // _UNEVEN_UNIT >= size
        unit = _UNEVEN_UNIT if is_enough else 1
    units = _share(num_columns // unit, rank, size)
    return Range(units.first * unit, units.end * unit)


def _share(count: int, rank: int, size: int) -> Range:
    """The rank's of so many things, `count` >= `size`; the first ranks have one more where it is uneven."""
    least, num_larger = divmod(count, size)
    first = rank * least + min(rank, num_larger)
    return Range(first, first + least + (rank < num_larger))


def _name_in_layer(name: str) -> str:
    in_layer = _IN_LAYER.fullmatch(name)
    return in_layer[1] if in_layer else name
