"""gpu_worker: log-probabilities of prompt tokens, chunk by chunk of the prefill.

    prompt      [ t0 t1 t2 t3 | t4 t5 ]        chunks [0, 4) and [4, 6)
    logits at     0  1  2  3    4              say how likely t1 t2 t3 t4 and t5 were

So a chunk gives the tokens behind each of its own, the first of the next chunk too. The logits of many positions are
large: they are computed and forgotten block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.logprobs import MAX_BLOCK, TopLogprobs, top_logprobs
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.prepared_step import Spans, StepRows
from services.gpu_worker.uploads import Int64s, upload_together
from services.wire.columns import pack_int32
from services.wire.request_params import NO_LOGPROBS, PromptParams
from services.wire.steps import PromptLogprobs


@dataclass(frozen=True, slots=True)
class WantedSpan:
    """Positions [first, first + count) of one row's prompt; `num_top` of the likeliest at each."""

    place: int
    first: int
    count: int
    num_top: int


@dataclass(frozen=True, slots=True)
class WantedPositions:
    """The prompt positions that one step gives.

    Attributes:
        spans: whose they are, in order.
        targets: [n] the prompt's ids there, on the host.
        indices: [n] int64 on the device, the computed token before each.
        target_ids: [n] int64, `targets` on the device.
        width: the largest num_top.
    """

    spans: tuple[WantedSpan, ...]
    targets: Int64s
    indices: Tensor
    target_ids: Tensor
    width: int


@dataclass(frozen=True, slots=True)
class PromptValues:
    """The values of all wanted positions, in blocks one after another."""

    wanted: WantedPositions
    blocks: tuple[TopLogprobs, ...]

    def to_host(self) -> PromptValues:
        """The same on the host, perhaps only once the device has come this far."""
        return PromptValues(self.wanted, tuple(block.to_host() for block in self.blocks))


class PromptLogprobsTable:
    """What rows [0, max_rows) want to know of their prompts."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._num_top = np.full(max_rows, NO_LOGPROBS, dtype=np.int64)
        self._first = np.zeros(max_rows, dtype=np.int64)
        self._num_prompt = np.zeros(max_rows, dtype=np.int64)
        self._prompts: dict[int, Int64s] = {}

    def set_row(self, row: int, params: PromptParams, prompt: Int64s) -> None:
        """Sets what a row wants from now on, of this prompt."""
        self._num_top[row] = params.num_logprobs
        self._first[row] = max(1, params.logprobs_from)
        self._num_prompt[row] = len(prompt)
        self._prompts.pop(row, None)
        if params.num_logprobs != NO_LOGPROBS:
            self._prompts[row] = prompt

    def among(self, spans: Spans) -> WantedPositions | None:
        """The positions that a step gives; None if it gives none."""
        if not self._prompts:
            return None
        rows = spans.rows
        firsts = np.maximum(spans.starts + 1, self._first[rows])
        ends = np.minimum(spans.ends + 1, self._num_prompt[rows])
        places = np.flatnonzero((self._num_top[rows] != NO_LOGPROBS) & (firsts < ends))
        if not len(places):
            return None
        wanted, indices, targets = [], [], []
        for place in places.tolist():
            first, end, row = int(firsts[place]), int(ends[place]), int(rows[place])
            wanted.append(WantedSpan(int(spans.places[place]), first, end - first, int(self._num_top[row])))
            indices.append(np.arange(first, end) - 1 - spans.starts[place] + spans.offsets[place])
            targets.append(self._prompts[row][first:end])
        ids = np.concatenate(targets)
        on_device, target_ids = upload_together([np.concatenate(indices), ids], self._device)
        return WantedPositions(tuple(wanted), ids, on_device, target_ids, max(each.num_top for each in wanted))


def prompt_values(runner: ModelRunner, hidden: Tensor, wanted: WantedPositions) -> PromptValues:
    """Computes them.

    Args:
        runner: the model.
        hidden: [num_tokens, hidden_size], of the step (see `ModelRunner.hidden`).
        wanted: the positions.
    """
    num_at_once = max(1, MAX_BLOCK // runner.config.vocab_size)
    blocks = []
    for indices, ids in zip(
        torch.split(wanted.indices, num_at_once), torch.split(wanted.target_ids, num_at_once), strict=True
    ):
        blocks.append(top_logprobs(runner.logits(runner.normed(hidden, indices)), ids, wanted.width))
    return PromptValues(wanted, tuple(blocks))


def prompt_pieces(values: PromptValues, rows: StepRows, has_failed: Sequence[bool]) -> list[PromptLogprobs]:
    """The pieces of a result, of rows that have not failed; the values lie on the host."""
    own = np.concatenate([block.own.numpy() for block in values.blocks])
    top_ids = np.concatenate([block.ids.numpy() for block in values.blocks])
    top_values = np.concatenate([block.values.numpy() for block in values.blocks])
    ids = np.concatenate([values.wanted.targets[:, None], top_ids], axis=1)
    numbers = np.concatenate([own[:, None], top_values], axis=1)
    pieces, start = [], 0
    for span in values.wanted.spans:
        end, width = start + span.count, min(1 + span.num_top, ids.shape[1])
        if not has_failed[span.place]:
            pieces.append(
                PromptLogprobs(
                    request_id=rows.request_ids[span.place],
                    attempt=rows.attempts[span.place],
                    first_position=span.first,
                    counts=pack_int32([width] * span.count),
                    token_ids=ids[start:end, :width].astype("<i4").tobytes(),
                    logprobs=numbers[start:end, :width].astype("<f4").tobytes(),
                )
            )
        start = end
    return pieces
