"""gpu_worker: what distinguishes one model family from another.

A family is data and functions: defaults of its configuration, which projections have biases, which layers see through a
window, which have experts, and how it makes queries, keys and values. The rest of a decoder is the same for all
(`decoder.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from services.gpu_worker.models.config import ExpertConfig, ModelConfig
from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.models.layer_weights import LayerWeights
from services.gpu_worker.models.operators import Operators
from services.gpu_worker.models.projection import Projection


@dataclass(frozen=True, slots=True)
class Biases:
    """Which projections of a layer add a bias."""

    qkv: bool
    output: bool
    mlp: bool


NO_BIASES = Biases(qkv=False, output=False, mlp=False)

# (hidden [num_tokens, hidden_size], layer, config, operators) -> queries and keys in one [num_tokens, num_heads +
# num_kv_heads, head_dim], not rotated yet, and values [num_tokens, num_kv_heads, head_dim].
ProjectQkv = Callable[[Tensor, LayerWeights[Projection], ModelConfig, Operators], tuple[Tensor, Tensor]]


_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def refuse_experts(fields: ConfigFields, num_layers: int) -> ExpertConfig | None:
    """Of a family without experts: None. Mixtures have been published under the model_type of a dense family too."""
    for name in _EXPERT_FIELDS:
        if fields.has(name):
            raise fields.error(name, "mixtures of experts are not supported in this family")
    return None


@dataclass(frozen=True, slots=True)
class Family:
    """One model type of config.json.

    Attributes:
        model_type: its name there.
        default_num_kv_heads: where the configuration has no such field; None: as many as query heads.
        default_head_dim: likewise; None: hidden_size / num_attention_heads.
        default_max_positions: likewise.
        has_qk_norm: whether queries and keys are normalised head by head before they are rotated.
        gguf_interleaves_heads: whether GGUF files of this type keep a head's rotary pairs next to each other.
        read_biases: which projections have biases.
        read_windows: the window of each of num_layers layers.
        project_qkv: makes a layer's queries, keys and values.
        read_experts: the experts of num_layers layers, None where there are none.
    """

    model_type: str
    default_num_kv_heads: int | None
    default_head_dim: int | None
    default_max_positions: int
    has_qk_norm: bool
    gguf_interleaves_heads: bool
    read_biases: Callable[[ConfigFields], Biases]
    read_windows: Callable[[ConfigFields, int], tuple[int | None, ...]]
    project_qkv: ProjectQkv
    read_experts: Callable[[ConfigFields, int], ExpertConfig | None] = refuse_experts
