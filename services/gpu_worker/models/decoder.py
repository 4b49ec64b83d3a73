"""gpu_worker: one forward pass of a decoder: what all families do alike.

Sums are kept in the model's dtype, as the models were trained; logits are float32. The final norm and the head are
apart from the layers, because few tokens need them: those that sample, and the prompt's where somebody asks for more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.attention.backend import StepAttention
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.feed_forward import feed_forward
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.operators import Operators
from services.gpu_worker.models.projection import Projection
from services.gpu_worker.models.registry import FAMILIES
from services.gpu_worker.models.rotary import rotary_cos_sin
from services.gpu_worker.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model and how its small operators are computed.

    Attributes:
        config: the model.
        weights: its weights.
        operators: see `Operators`.
        embed: vectors of ids, from these and the embedding.
        rounds_from: new tokens of a step from which on the layers' products compute in bfloat16; None: never.
    """

    config: ModelConfig
    weights: DecoderWeights[Projection]
    operators: Operators
    embed: Callable[[Tensor, Tensor], Tensor] = functional.embedding
    rounds_from: int | None = None

    def layers(self, inputs: StepInputs, attention: StepAttention) -> Tensor:
        """Runs the new tokens of a step through the layers; their keys and values are stored on the way.

        Args:
            inputs: what to compute.
            attention: attention of this very step.

        Returns:
            [num_tokens, hidden_size], before the final norm.
        """
        hidden, added = self.pass_layers(self.embedded(inputs), self.rotation(inputs), attention)
        return hidden if added is None else hidden + added

    def embedded(self, inputs: StepInputs) -> Tensor:
        """The new tokens' vectors: [num_tokens, hidden_size]."""
        return self.embed(inputs.input_ids, self.weights.embedding)

    def rotation(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Of the new tokens' positions, see `rotary_cos_sin`."""
        weights, scale = self.weights, self.config.rotary.attention_scale
        return rotary_cos_sin(weights.rotary_frequencies, scale, inputs.positions, weights.embedding.dtype)

    def pass_layers(
        self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], attention: StepAttention
    ) -> tuple[Tensor, Tensor | None]:
        """What `layers` does between embedding and the last sum.

        Args:
            hidden: from `embedded`; may be written to.
            cos_sin: from `rotation`.
            attention: attention of this very step.

        Returns:
            Sums, and what the last layer adds to them (None: there is none): [num_tokens, hidden_size] each.
        """
        config, weights, operators = self.config, self.weights, self.operators
        project_qkv = FAMILIES[config.model_type].project_qkv
        added: Tensor | None = None  # what the layer before adds to the sums
        dtype = self._product_dtype(hidden)
        for index, layer in enumerate(weights.layers):
            hidden, x = self._norm(hidden, added, layer.input_norm)
            heads, values = project_qkv(x.to(dtype), layer, config, operators)
            queries = attention.write_rotated(index, heads, values, cos_sin)  # [num_tokens, num_heads, head_dim]
            attended = attention.attend(index, queries, config.windows[index])  # [num_tokens, num_heads, head_dim]
            added = layer.output(attended.flatten(1).to(dtype))
            hidden, x = self._norm(hidden, added, layer.mlp_norm)
            added = feed_forward(x, layer, config, operators)  # [num_tokens, hidden_size]
        return hidden, added

    def _product_dtype(self, hidden: Tensor) -> torch.dtype:
        """Of what layers multiply: that of the sums, or bfloat16 where all their products round to it anyway."""
        is_rounded = self.rounds_from is not None and len(hidden) >= self.rounds_from
        return torch.bfloat16 if is_rounded else hidden.dtype

    def _norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        eps = self.config.rms_norm_eps
        if added is None:
            return hidden, self.operators.norm(hidden, weight, eps)
        return self.operators.add_norm(hidden, added, weight, eps)

    def final_norm(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """What the head reads of some tokens ([n] int64): [n, hidden_size], in the model's dtype."""
        return self.operators.norm(hidden.index_select(0, indices), self.weights.final_norm, self.config.rms_norm_eps)

    def logits(self, normed: Tensor) -> Tensor:
        """[n, vocab_size] float32 from [n, hidden_size]; memory of their own."""
        return self.weights.head(normed).to(torch.float32)
