"""gpu_worker: the part of one row that a layer with a given window looks at, and attention over it.

positions of the row   0 ............ first ........ end - num_new ........ end
                                      [ context that is read               )
                                                    [ new tokens: queries  )
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row in one step, under one window.

    Attributes:
        row: its index in the step.
        tokens: its new tokens among all new tokens of the step.
        first: the first position that any of them sees.
        end: one past the last position.
    """

    row: int
    tokens: slice
    first: int
    end: int

    @property
    def num_new(self) -> int:
        """New tokens of the row."""
        return int(self.tokens.stop - self.tokens.start)

    @property
    def length(self) -> int:
        """Positions that are read."""
        return self.end - self.first


def row_spans(inputs: StepInputs, window: int | None) -> list[RowSpan]:
    """The spans of all rows of a step under a window (None: no window)."""
    spans = []
    starts = inputs.query_starts
    for row, (num_new, end) in enumerate(zip(inputs.query_lengths, inputs.context_lengths, strict=True)):
        first = 0 if window is None else max(0, end - num_new - window + 1)
        spans.append(RowSpan(row, slice(starts[row], starts[row + 1]), first, end))
    return spans


def additive_mask(span: RowSpan, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What to add to the scores of a row, [num_new, length] of 0 and -inf; None where a plain rule says the same.

    The plain rules: a single new token sees the whole span; new tokens without computed ones before them see each other
    causally.
    """
    windowed = window is not None and span.length > window
    if span.num_new == 1 or (span.num_new == span.length and not windowed):
        return None
    keys = torch.arange(span.first, span.end, device=device)
    queries = keys[-span.num_new :, None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def attend_span(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of a row's new tokens over its span; key/value heads are shared by stride, not copied.

    Args:
        queries: [num_new, num_heads, head_dim].
        keys: [length, num_kv_heads, head_dim].
        values: likewise.
        mask: from `additive_mask`.

    Returns:
        [num_new, num_heads, head_dim].
    """
    num_new, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    by_head = queries.view(num_new, num_kv_heads, group, head_dim).permute(
        1, 2, 0, 3
    )  # [num_kv_heads, group, num_new, d]
    shared_keys = keys.permute(1, 0, 2)[:, None].expand(-1, group, -1, -1)  # [num_kv_heads, group, length, head_dim]
    shared_values = values.permute(1, 0, 2)[:, None].expand(-1, group, -1, -1)
    attended = functional.scaled_dot_product_attention(
        by_head, shared_keys, shared_values, attn_mask=mask, is_causal=mask is None and num_new > 1
    )
    return attended.permute(2, 0, 1, 3).flatten(1, 2)
