"""gpu_worker: the rows that requests hold, and how a plan becomes the tensors of a step.

A request keeps one row for as long as it runs. By row lie on the device: the last token, the page table, the sampling
parameters. The host keeps what it can know without waiting for the device: how many tokens a row has and how many are
computed. So plan k + 1 is laid out before result k is read: a decoding row's input id is taken from the device, where
the sampler of step k has put it.

    row's tokens   [ 0 ........ known on the host ........ )[ sampled since: on the device  )
                   [ computed ........ )[ this step: start, start + n )

It owns these rows. It never decides what runs and never frees a page; a plan that does not fit them is the scheduler's
fault, and after it nothing here can be trusted: `PlanError` ends the process.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.gpu_worker.page_table import PageTable
from services.gpu_worker.prepared_step import Bools, PreparedStep, StepRows
from services.gpu_worker.sampling_table import SamplingTable
from services.gpu_worker.step_inputs import StepInputs
from services.gpu_worker.uploads import Int64s, upload_together
from services.wire.messages import NewRow, StepPlan

Int32s = npt.NDArray[np.int32]
_NOT_STARTED = -1  # num_computed of a row whose first start position is still to come

logger = logging.getLogger(__name__)


class PlanError(Exception):
    """A plan that does not continue what this worker holds: the scheduler's fault, and the end of this process."""


@dataclass(frozen=True, slots=True)
class WorkerSizes:
    """What a plan must stay within.

    Attributes:
        max_rows: rows are [0, max_rows).
        max_model_len: most tokens of a row.
        vocab_size: token ids are [0, vocab_size).
        page_size, num_pages: the pool.
    """

    max_rows: int
    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int


@dataclass(slots=True)
class _HeldRow:
    request_id: bytes
    attempt: int
    token_ids: Int32s
    is_refused: bool
    failed_page: int | None = None  # the first page (its place in the line) that may hold what is not finite


class WorkerState:
    """All rows of a worker."""

    def __init__(self, sizes: WorkerSizes, device: torch.device) -> None:
        self._sizes = sizes
        self._device = device
        max_pages = min(-(-sizes.max_model_len // sizes.page_size), sizes.num_pages)
        self._pages = PageTable(sizes.max_rows, max_pages, device)
        self._sampling = SamplingTable(sizes.max_rows, device)
        self._last_tokens = torch.zeros(sizes.max_rows, dtype=torch.int64, device=device)
        self._held: dict[int, _HeldRow] = {}
        # By row, for all rows of a step at once; of rows that nobody holds they mean nothing.
        self._num_tokens = np.zeros(sizes.max_rows, dtype=np.int64)
        self._num_known = np.zeros(sizes.max_rows, dtype=np.int64)
        self._num_prompt = np.zeros(sizes.max_rows, dtype=np.int64)
        self._num_computed = np.zeros(sizes.max_rows, dtype=np.int64)

    @property
    def num_held(self) -> int:
        """Rows that requests hold."""
        return len(self._held)

    def release_all(self) -> None:
        """Forgets every row: their scheduler is gone."""
        self._held.clear()

    def prepare(self, plan: StepPlan) -> PreparedStep | None:
        """Applies a plan and lays out its step; None when the plan runs nothing.

        The rows then count as computed and sampled, whatever becomes of the step.

        Raises:
            PlanError: the plan does not fit what is held here.
        """
        pages_to_clear = self._release(_column(plan.released_rows).tolist())
        for new_row in plan.new_rows:
            self._set_up(new_row)
        if plan.new_rows:
            self._sampling.set_rows([new.row for new in plan.new_rows], [new.sampling for new in plan.new_rows])
        self._append_pages(plan)
        self._pages.commit()
        rows = _column(plan.rows)
        if not len(rows):
            return None
        starts, counts = _column(plan.start_positions), _column(plan.num_new_tokens)
        samples = np.frombuffer(plan.samples, dtype=np.uint8).astype(np.bool_)
        self._check(rows, starts, counts, samples)
        step_rows = self._step_rows(rows, starts, samples)
        inputs = self._lay_out(rows, starts, counts)
        places = np.flatnonzero(samples)
        sampling_places, sampling_rows = upload_together([places, rows[places]], self._device)
        groups = self._sampling.groups(np.where(samples, rows, -1), starts + counts)
        self._num_computed[rows] = starts + counts
        self._num_tokens[rows[places]] += 1
        return PreparedStep(inputs, groups, sampling_places, sampling_rows, step_rows, pages_to_clear)

    def keep_tokens(self, step: PreparedStep, token_ids: Tensor) -> None:
        """Makes the sampled tokens ([num_rows] int64, on the device) the last ones of their rows."""
        self._last_tokens.index_copy_(0, step.sampling_rows, token_ids.index_select(0, step.sampling_places))

    def note_failures(self, rows: StepRows, is_failed: Bools) -> None:
        """Remembers which pages failed rows have spoiled, until they are released."""
        for place in np.flatnonzero(is_failed).tolist():
            held = self._held.get(int(rows.rows[place]))
            if held is None or (held.request_id, held.attempt) != (rows.request_ids[place], rows.attempts[place]):
                continue
            page = int(rows.starts[place]) // self._sizes.page_size
            held.failed_page = page if held.failed_page is None else min(page, held.failed_page)

    # ------------------------------------------------------------ what a plan changes

    def _release(self, rows: list[int]) -> list[int]:
        """Forgets rows; returns the pages that must be cleared before somebody else reads them."""
        spoiled: list[int] = []
        for row in rows:
            held = self._held.pop(row, None)
            if held is None:
                raise PlanError(f"row {row} is released, but nobody holds it")
            if held.failed_page is not None:
                spoiled += self._pages.line(row)[held.failed_page :]
        return spoiled

    def _set_up(self, new: NewRow) -> None:
        token_ids = np.frombuffer(new.token_ids, dtype="<i4").astype(np.int32)
        if new.row in self._held or new.row >= self._sizes.max_rows:
            raise PlanError(f"row {new.row} of {self._sizes.max_rows} is given to a request, but is not free")
        if not 1 <= new.num_prompt_tokens <= len(token_ids) <= self._sizes.max_model_len:
            raise PlanError(
                f"row {new.row}: {new.num_prompt_tokens} prompt tokens of {len(token_ids)}, "
                f"context {self._sizes.max_model_len}"
            )
        is_refused = bool((token_ids < 0).any() or (token_ids >= self._sizes.vocab_size).any())
        if is_refused:
            logger.error("request %s holds ids outside [0, %d)", new.request_id.hex(), self._sizes.vocab_size)
            token_ids = np.zeros_like(token_ids)  # it fails by itself; the model must not read past its embedding
        self._held[new.row] = _HeldRow(new.request_id, new.attempt, token_ids, is_refused)
        self._num_tokens[new.row] = self._num_known[new.row] = len(token_ids)
        self._num_prompt[new.row] = new.num_prompt_tokens
        self._num_computed[new.row] = _NOT_STARTED
        self._pages.clear(new.row)
        self._add_pages(new.row, np.frombuffer(new.page_ids, dtype="<i4"))

    def _append_pages(self, plan: StepPlan) -> None:
        page_ids = np.frombuffer(plan.page_ids, dtype="<i4")
        start = 0
        for row, count in zip(_column(plan.page_rows).tolist(), _column(plan.page_counts).tolist(), strict=True):
            if row not in self._held:
                raise PlanError(f"row {row} gets pages, but nobody holds it")
            self._add_pages(row, page_ids[start : start + count])
            start += count

    def _add_pages(self, row: int, page_ids: Int32s) -> None:
        if len(page_ids) and not 0 <= page_ids.min() <= page_ids.max() < self._sizes.num_pages:
            raise PlanError(f"row {row} gets a page outside [0, {self._sizes.num_pages})")
        num_pages = int(self._pages.num_pages(np.array([row]))[0]) + len(page_ids)
        if num_pages > self._pages.max_pages:
            raise PlanError(f"row {row} gets {num_pages} pages, its context needs at most {self._pages.max_pages}")
        self._pages.append(row, page_ids.astype(np.int32))

    # ------------------------------------------------------------ what a plan runs

    def _check(self, rows: Int64s, starts: Int64s, counts: Int64s, samples: Bools) -> None:
        if len(np.unique(rows)) != len(rows):
            raise PlanError("a row runs twice in one step")
        for row in rows.tolist():
            if row not in self._held:
                raise PlanError(f"row {row} runs, but nobody holds it")
        ends = starts + counts
        num_tokens, num_computed = self._num_tokens[rows], self._num_computed[rows]
        is_new = num_computed == _NOT_STARTED
        is_on_device = starts >= self._num_known[rows]
        rules = {
            "computes nothing": counts < 1,
            "does not start where it left off": ~is_new & (starts != num_computed),
            "computes tokens that it does not have": ends > num_tokens,
            "has too few pages": ends > self._pages.num_pages(rows) * self._sizes.page_size,
            "samples before its last token": samples & (ends != num_tokens),
            "needs ids that are known nowhere": (ends > self._num_known[rows])
            & ~(is_on_device & (starts == num_tokens - 1)),
        }
        for problem, is_broken in rules.items():
            if is_broken.any():
                place = int(np.flatnonzero(is_broken)[0])
                raise PlanError(
                    f"row {rows[place]} {problem}: tokens [{starts[place]}, {ends[place]}) of {num_tokens[place]}, "
                    f"{num_computed[place]} computed"
                )

    def _step_rows(self, rows: Int64s, starts: Int64s, samples: Bools) -> StepRows:
        held = [self._held[row] for row in rows.tolist()]
        return StepRows(
            rows=rows,
            request_ids=[each.request_id for each in held],
            attempts=np.array([each.attempt for each in held], dtype=np.int64),
            first_indexes=self._num_tokens[rows] - self._num_prompt[rows],
            starts=starts,
            samples=samples,
            is_refused=np.array([each.is_refused for each in held], dtype=np.bool_),
        )

    def _lay_out(self, rows: Int64s, starts: Int64s, counts: Int64s) -> StepInputs:
        ends = starts + counts
        offsets = np.cumsum(counts) - counts  # where each row's new tokens begin
        positions = np.arange(int(counts.sum())) + np.repeat(starts - offsets, counts)
        slots = self._pages.slots(np.repeat(rows, counts), positions, self._sizes.page_size)
        is_on_device = starts >= self._num_known[rows]
        on_host = np.zeros(len(positions), dtype=np.int64)
        for place in np.flatnonzero(~is_on_device).tolist():
            start, count, offset = int(starts[place]), int(counts[place]), int(offsets[place])
            token_ids = self._held[int(rows[place])].token_ids
            on_host[offset : offset + count] = token_ids[start : start + count]
        input_ids, on_positions, slot_mapping, step_rows, last_tokens, device_places, device_rows = upload_together(
            [on_host, positions, slots, rows, ends - starts + offsets - 1, offsets[is_on_device], rows[is_on_device]],
            self._device,
        )
        if len(device_places):
            input_ids.index_copy_(0, device_places, self._last_tokens.index_select(0, device_rows))
        return StepInputs(
            input_ids=input_ids,
            positions=on_positions,
            slot_mapping=slot_mapping,
            page_table=self._pages.gather(step_rows, -(-int(ends.max()) // self._sizes.page_size)),
            query_lengths=tuple(counts.tolist()),
            context_lengths=tuple(ends.tolist()),
            sample_indices=last_tokens,
        )


def _column(column: bytes) -> Int64s:
    return np.frombuffer(column, dtype="<i4").astype(np.int64)
