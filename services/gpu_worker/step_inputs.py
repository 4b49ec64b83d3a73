"""gpu_worker: the tensors of one forward pass.

Prefill and decode are the same thing here: a *row* (one request's place in the batch) has `n >= 1` new tokens on top of
the tokens whose keys and values already lie in its pages. All new tokens of all rows are flattened into one dimension,
row after row:

    row 0: 3 new tokens, 5 computed     row 1: 1 new token, 9 computed
    input_ids   [ a0 a1 a2 | b0 ]       query_lengths   (3, 1)
    positions   [  5  6  7 |  9 ]       context_lengths (8, 10)
    slot_mapping: where each new token's key and value go, page_id * page_size + position % page_size

This module owns no state and never decides what runs: it only lays out what a plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one row computes in a step, in plain numbers.

    Attributes:
        token_ids: the `n >= 1` new tokens.
        num_computed_tokens: tokens whose keys and values already lie in the pages; the first new position.
        page_ids: pages of the row in order of position; at least ceil((num_computed_tokens + n) / page_size) of them.
        samples: whether the logits of the row's last new token are wanted.
    """

    token_ids: Sequence[int]
    num_computed_tokens: int
    page_ids: Sequence[int]
    samples: bool


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Input of one forward pass. Tensors lie on the model's device; lengths are host integers (no device read needed).

    Attributes:
        input_ids: [num_tokens] int64, new tokens of all rows, flattened.
        positions: [num_tokens] int64, position of each new token in its request.
        slot_mapping: [num_tokens] int64, slot that receives the token's key and value; one slot for one token.
        page_table: [num_rows, max_pages] int64, pages of each row in order; past a row's end any valid page.
        query_lengths: num_rows numbers >= 1, new tokens of each row; their sum is num_tokens.
        context_lengths: num_rows numbers, tokens of each row after this step, new ones included.
        sample_indices: [num_sampling_rows] int64, indices into [0, num_tokens) whose logits are wanted, in row order.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    page_table: Tensor
    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    sample_indices: Tensor

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows together."""
        return self.input_ids.shape[0]

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.query_lengths)

    @property
    def query_starts(self) -> tuple[int, ...]:
        """num_rows + 1 offsets: row r's new tokens are [query_starts[r], query_starts[r + 1])."""
        return tuple(accumulate(self.query_lengths, initial=0))


def one_row_a_token(inputs: StepInputs) -> StepInputs:
    """The same step as rows of one new token each: those of a row share its pages."""
    lengths = torch.tensor(inputs.query_lengths)
    ends = (
        end - num_new + new
        for num_new, end in zip(inputs.query_lengths, inputs.context_lengths, strict=True)
        for new in range(1, num_new + 1)
    )
    return replace(
        inputs,
        page_table=inputs.page_table.repeat_interleave(lengths, 0),
        query_lengths=(1,) * inputs.num_tokens,
        context_lengths=tuple(ends),
    )


def build_step_inputs(rows: Sequence[StepRow], page_size: int, device: torch.device) -> StepInputs:
    """Lays out rows as tensors, the obvious way; what builds a step faster must agree with it.

    Args:
        rows: at least one row, each with at least one new token.
        page_size: tokens in a page, >= 1.
        device: where the model runs.

    Returns:
        The step's inputs.

    Raises:
        ValueError: no rows, a row without new tokens, or with too few pages: the plan is wrong.
    """
    if not rows:
        raise ValueError("a step needs at least one row")
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sample_indices: list[int] = []
    for index, row in enumerate(rows):
        end = row.num_computed_tokens + len(row.token_ids)
        if not row.token_ids:
            raise ValueError(f"row {index} has no new token")
        if len(row.page_ids) * page_size < end:
            raise ValueError(f"row {index} has {len(row.page_ids)} pages of {page_size} for {end} tokens")
        new_positions = range(row.num_computed_tokens, end)
        ids.extend(row.token_ids)
        positions.extend(new_positions)
        slots.extend(row.page_ids[p // page_size] * page_size + p % page_size for p in new_positions)
        if row.samples:
            sample_indices.append(len(ids) - 1)
    max_pages = max(len(row.page_ids) for row in rows)
    # Short rows repeat their last page: a valid page, never read beyond the row's context length.
    table = [[*row.page_ids, *[row.page_ids[-1]] * (max_pages - len(row.page_ids))] for row in rows]
    return StepInputs(
        input_ids=_int64(ids, device),
        positions=_int64(positions, device),
        slot_mapping=_int64(slots, device),
        page_table=_int64(table, device),
        query_lengths=tuple(len(row.token_ids) for row in rows),
        context_lengths=tuple(row.num_computed_tokens + len(row.token_ids) for row in rows),
        sample_indices=_int64(sample_indices, device),
    )


def _int64(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
