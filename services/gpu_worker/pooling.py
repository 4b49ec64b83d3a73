"""gpu_worker: hidden states of prompts, for embeddings.

EMBED_LAST is the last prompt token's after the final norm, EMBED_MEAN the mean over all prompt tokens, each after the
final norm. The sum of a mean is kept by row as float32 over the chunks of a prefill; it changes only when a step has
run to its end, so that one which is run again row by row adds nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.prepared_step import Spans, StepRows
from services.gpu_worker.row_lines import RowLines, with_room
from services.gpu_worker.uploads import Int64s, to_host, upload_together
from services.wire.request_params import Task
from services.wire.steps import Embedding


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The rows of a step whose hidden states are read.

    Attributes:
        last_places: [k] of the step, rows whose last prompt token is computed and wanted.
        last_indices: [k] int64 on the device, these tokens.
        mean_places: [m] of the step, rows whose mean is complete with it.
        complete: [m] int64 on the device, which of the n rows below these are.
        lines: [n] int64 on the device, the lines of the sums of all rows whose mean is being made.
        keeps: [n, 1] float32 on the device, 0 for a row that begins, else 1.
        lengths: [n, 1] float32 on the device, prompt tokens.
        token_indices: [t] int64 on the device, the computed tokens of these rows.
        token_rows: [t] int64 on the device, which of the n each is of.
    """

    last_places: Int64s
    last_indices: Tensor
    mean_places: Int64s
    complete: Tensor
    lines: Tensor
    keeps: Tensor
    lengths: Tensor
    token_indices: Tensor
    token_rows: Tensor


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a step gives: values [m, hidden_size] float32 of complete rows, and sums that go on."""

    places: Int64s
    values: Tensor
    lines: Tensor
    sums: Tensor

    def to_host(self) -> Pooled:
        """The values on the host, perhaps only once the device has come this far."""
        return Pooled(self.places, to_host(self.values), self.lines, self.sums)


class PoolingTable:
    """What rows [0, max_rows) are for, and the sums of those that make a mean."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._tasks = np.full(max_rows, Task.GENERATE, dtype=np.int64)
        self._num_prompt = np.zeros(max_rows, dtype=np.int64)
        self._rows = RowLines(max_rows, device)
        self._sums = torch.zeros((0, 1), dtype=torch.float32, device=device)

    def set_row(self, row: int, task: Task, num_prompt_tokens: int) -> None:
        """Sets what a row is for from now on."""
        self._tasks[row] = task
        self._num_prompt[row] = num_prompt_tokens
        if task == Task.EMBED_MEAN:
            self._rows.take(row)
        else:
            self._rows.give_back(row)

    def among(self, spans: Spans) -> PooledRows | None:
        """The rows of a step that pool; None if none does."""
        tasks = self._tasks[spans.rows]
        if not tasks.any():
            return None
        lengths = self._num_prompt[spans.rows]
        last = np.flatnonzero((tasks == Task.EMBED_LAST) & (spans.ends == lengths))
        mean = np.flatnonzero(tasks == Task.EMBED_MEAN)
        counts = (spans.ends - spans.starts)[mean]
        token_rows = np.repeat(np.arange(len(mean)), counts)
        begins = np.cumsum(counts) - counts
        tokens = np.arange(int(counts.sum())) + np.repeat(spans.offsets[mean] - begins, counts)
        complete = np.flatnonzero((spans.ends == lengths)[mean])
        last_indices, on_device, lines, keeps, num_tokens, token_indices, on_device_rows = upload_together(
            [
                (spans.offsets + spans.ends - spans.starts - 1)[last],
                complete,
                self._rows.of(spans.rows[mean]),
                (spans.starts[mean] > 0).astype(np.int64),
                lengths[mean],
                tokens,
                token_rows,
            ],
            self._device,
        )
        return PooledRows(
            last_places=spans.places[last],
            last_indices=last_indices,
            mean_places=spans.places[mean[complete]],
            complete=on_device,
            lines=lines,
            keeps=keeps[:, None].to(torch.float32),
            lengths=num_tokens[:, None].to(torch.float32),
            token_indices=token_indices,
            token_rows=on_device_rows,
        )

    def pool(self, runner: ModelRunner, hidden: Tensor, rows: PooledRows) -> Pooled:
        """Computes what a step gives.

        Args:
            runner: the model.
            hidden: [num_tokens, hidden_size], of the step (see `ModelRunner.hidden`).
            rows: the rows that pool.
        """
        self._sums = with_room(self._sums, self._rows.num_lines, hidden.shape[1])
        last = runner.normed(hidden, rows.last_indices).to(torch.float32)
        before = self._sums.index_select(0, rows.lines) * rows.keeps
        tokens = runner.normed(hidden, rows.token_indices).to(torch.float32)
        sums = before.index_add_(0, rows.token_rows, tokens)
        means = (sums / rows.lengths).index_select(0, rows.complete)
        places = np.concatenate([rows.last_places, rows.mean_places])
        return Pooled(places, torch.cat([last, means]), rows.lines, sums)

    def keep(self, pooled: Pooled) -> None:
        """Keeps the sums for the next chunks."""
        self._sums.index_copy_(0, pooled.lines, pooled.sums)


def embeddings(pooled: Pooled, rows: StepRows, has_failed: Sequence[bool]) -> list[Embedding]:
    """The embeddings of a result, of rows that have not failed; the values lie on the host."""
    values = pooled.values.numpy()
    return [
        Embedding(rows.request_ids[place], rows.attempts[place], values[index].astype("<f4").tobytes())
        for index, place in enumerate(pooled.places.tolist())
        if not has_failed[place]
    ]
