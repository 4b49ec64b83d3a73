"""gpu_worker: the rows that requests hold, and how a plan becomes the tensors of a step.

A request keeps one row for as long as it runs. By row lie on the device: the last token, the page table, and what the
request wants of its logits (`step_work`). The host keeps what it can know without waiting for the device: how many
tokens a row has and how many are computed. So plan k + 1 is laid out before result k is read: a decoding row's input id
is taken from the device, where the sampler of step k has put it.

    row's tokens   [ 0 ........ known on the host ........ )[ sampled since: on the device  )
                   [ computed ........ )[ this step: start, start + n )

A row with a grammar may get ids that nobody sampled. A plan that was made before that was known computes its tokens,
and samples only if these are the row's last ones: see `pick`.

It owns these rows. It never decides what runs and never frees a page; a plan that does not fit them is the scheduler's
fault, and after it nothing here can be trusted: `PlanError` ends the process.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.gpu_worker.grammar_seam import Grammars, MaskJob
from services.gpu_worker.page_table import PageTable
from services.gpu_worker.plan_check import NOT_STARTED, PlanError, PlannedRows, check_rows
from services.gpu_worker.prepared_step import PreparedStep, Spans, StepRows
from services.gpu_worker.row_lines import Bools, Picks
from services.gpu_worker.step_inputs import StepInputs
from services.gpu_worker.step_work import RowOptions, StepOutput, StepWork
from services.gpu_worker.uploads import Int64s, int64_column, upload_together
from services.runtime.logs import about
from services.wire.messages import NO_LOGPROBS, NewRow, StepPlan, Task

Int32s = npt.NDArray[np.int32]
_ANYWHERE = 2**62  # latest start of a row of whose prompt nothing is wanted

logger = logging.getLogger(__name__)


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

    def __init__(self, sizes: WorkerSizes, device: torch.device, grammars: Grammars | None = None) -> None:
        """`grammars` takes care of rows whose answers have one; without it a plan must not bring any."""
        self._sizes = sizes
        self._device = device
        self._grammars = grammars
        max_pages = min(-(-sizes.max_model_len // sizes.page_size), sizes.num_pages)
        self._pages = PageTable(sizes.max_rows, max_pages, device)
        self.options = RowOptions(sizes.max_rows, sizes.vocab_size, device)
        """What the rows want of their logits and hidden states."""
        self._last_tokens = torch.zeros(sizes.max_rows, dtype=torch.int64, device=device)
        self._held: dict[int, _HeldRow] = {}
        # By row, for all rows of a step at once; of rows that nobody holds they mean nothing.
        self._num_tokens = np.zeros(sizes.max_rows, dtype=np.int64)
        self._num_known = np.zeros(sizes.max_rows, dtype=np.int64)
        self._num_prompt = np.zeros(sizes.max_rows, dtype=np.int64)
        self._num_computed = np.zeros(sizes.max_rows, dtype=np.int64)
        self._latest_starts = np.zeros(sizes.max_rows, dtype=np.int64)
        self._has_grammar = np.zeros(sizes.max_rows, dtype=np.bool_)

    @property
    def num_held(self) -> int:
        """Rows that requests hold."""
        return len(self._held)

    def release_all(self) -> None:
        """Forgets every row: their scheduler is gone."""
        self._held.clear()
        if self._grammars is not None:
            self._grammars.release_all()

    def prepare(self, plan: StepPlan) -> PreparedStep | None:
        """Applies a plan and lays out its step; None when the plan runs nothing.

        The rows then count as computed, whatever becomes of the step. `pick` comes next.

        Raises:
            PlanError: the plan does not fit what is held here.
        """
        pages_to_clear = self._release(int64_column(plan.released_rows).tolist())
        for new_row in plan.new_rows:
            self._set_up(new_row)
        if plan.new_rows:
            token_ids = [self._held[new.row].token_ids.astype(np.int64) for new in plan.new_rows]
            self.options.set_rows(plan.new_rows, token_ids)
        self._append_pages(plan)
        self._pages.commit()
        rows = int64_column(plan.rows)
        if not len(rows):
            return None
        starts, counts = int64_column(plan.start_positions), int64_column(plan.num_new_tokens)
        samples = np.frombuffer(plan.samples, dtype=np.uint8).astype(np.bool_)
        spans = Spans(np.arange(len(rows)), rows, starts, starts + counts, np.cumsum(counts) - counts)
        self._check(spans, samples)
        step_rows = self._step_rows(rows, starts, samples)
        inputs = self._lay_out(spans)
        self._num_computed[rows] = spans.ends
        return PreparedStep(inputs, spans, step_rows, pages_to_clear, bool(self._has_grammar[rows].any()))

    def pick(self, step: PreparedStep) -> Picks:
        """The rows of a step that pick a token; they then count as sampled, whatever becomes of the step.

        A row that got ids without sampling them since its plan was made picks none, unless these were computed too.
        """
        rows, ends = step.spans.rows, step.spans.ends
        places = np.flatnonzero(step.rows.samples & (ends == self._num_tokens[rows]))
        picking = rows[places]
        positions = self._num_tokens[picking]
        self._num_tokens[picking] += 1
        return Picks(places, places, picking, positions, positions - self._num_prompt[picking])

    def keep(self, work: StepWork, output: StepOutput) -> None:
        """Makes what a whole step has picked the last tokens of its rows, and keeps what the next steps need of it."""
        self._last_tokens.index_copy_(0, work.rows, output.tokens.token_ids.index_select(0, work.places))
        self.options.keep(work, output)

    def note_failures(self, rows: StepRows, is_failed: Bools) -> None:
        """Remembers which pages failed rows have spoiled, until they are released."""
        for place in np.flatnonzero(is_failed).tolist():
            held = self._holder(rows, place)
            if held is not None:
                page = int(rows.starts[place]) // self._sizes.page_size
                held.failed_page = page if held.failed_page is None else min(page, held.failed_page)

    # ------------------------------------------------------------ grammars

    def begin_masks(self, picks: Picks) -> tuple[Picks, MaskJob] | None:
        """Starts to make the masks of the rows that have a grammar; None if no row has."""
        with_grammar = picks.select(self._has_grammar[picks.rows])
        if self._grammars is None or not len(with_grammar.rows):
            return None
        return with_grammar, self._grammars.begin_masks(with_grammar.rows.tolist())

    @torch.inference_mode()
    def advance(self, rows: StepRows, picks: Picks, token_ids: Int64s) -> dict[int, list[int]]:
        """Tells the grammars what their rows have picked, step after step.

        Args:
            rows: of the step.
            picks: the rows that have really got a token.
            token_ids: [n] these.

        Returns:
            By place in the step, the ids that must follow, of rows where any do; these rows then have them.
        """
        is_due = [
            bool(self._has_grammar[row]) and self._holder(rows, place) is not None
            for row, place in zip(picks.rows.tolist(), picks.places.tolist(), strict=True)
        ]
        due = picks.select(np.array(is_due, dtype=np.bool_))
        if self._grammars is None or not len(due.rows):
            return {}
        sampled = token_ids[np.array(is_due, dtype=np.bool_)].tolist()
        forced = {}
        followers = self._grammars.advance(due.rows.tolist(), sampled)
        for place, row, position, token_id, more in zip(
            due.places.tolist(), due.rows.tolist(), due.positions.tolist(), sampled, followers, strict=True
        ):
            fitting = more[: self._sizes.max_model_len - position - 1]
            if fitting:
                forced[place] = fitting
                self._append(row, position, [token_id, *fitting])
        return forced

    def _append(self, row: int, position: int, token_ids: list[int]) -> None:
        """The row's tokens from this position on are these; those in between are computed, nobody reads them again."""
        held = self._held[row]
        known = np.zeros(position + len(token_ids), dtype=np.int32)
        known[: len(held.token_ids)] = held.token_ids
        known[position:] = token_ids
        held.token_ids = known
        self._num_tokens[row] = self._num_known[row] = len(known)
        self.options.append(row, np.array(token_ids[1:], dtype=np.int64))

    def _holder(self, rows: StepRows, place: int) -> _HeldRow | None:
        """The row of a step, if it is still held by the same request."""
        held = self._held.get(int(rows.rows[place]))
        holder = (rows.request_ids[place], rows.attempts[place])
        return held if held is not None and (held.request_id, held.attempt) == holder else None

    # ------------------------------------------------------------ what a plan changes

    def _release(self, rows: list[int]) -> list[int]:
        """Forgets rows; returns the pages that must be cleared before somebody else reads them."""
        spoiled: list[int] = []
        for row in rows:
            held = self._held.pop(row, None)
            if held is None:
                raise PlanError(f"row {row} is released, but nobody holds it")
            if self._has_grammar[row] and self._grammars is not None:
                self._grammars.release(row)
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
            logger.error("a row holds ids outside [0, %d)", self._sizes.vocab_size, extra=about(new.request_id))
            token_ids = np.zeros_like(token_ids)  # it fails by itself; the model must not read past its embedding
        self._held[new.row] = _HeldRow(new.request_id, new.attempt, token_ids, is_refused)
        self._num_tokens[new.row] = self._num_known[new.row] = len(token_ids)
        self._num_prompt[new.row] = new.num_prompt_tokens
        self._num_computed[new.row] = NOT_STARTED
        self._latest_starts[new.row] = _latest_start(new)
        self._set_up_grammar(new)
        self._pages.clear(new.row)
        self._add_pages(new.row, np.frombuffer(new.page_ids, dtype="<i4"))

    def _set_up_grammar(self, new: NewRow) -> None:
        self._has_grammar[new.row] = new.sampling.grammar is not None
        if new.sampling.grammar is not None:
            if self._grammars is None:
                raise PlanError(f"row {new.row} has a grammar; this worker has none")
            self._grammars.set_up(new)

    def _append_pages(self, plan: StepPlan) -> None:
        page_ids = np.frombuffer(plan.page_ids, dtype="<i4")
        start = 0
        counts = int64_column(plan.page_counts).tolist()
        for row, count in zip(int64_column(plan.page_rows).tolist(), counts, strict=True):
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

    def _check(self, spans: Spans, samples: Bools) -> None:
        rows = spans.rows
        if len(np.unique(rows)) != len(rows):
            raise PlanError("a row runs twice in one step")
        for row in rows.tolist():
            if row not in self._held:
                raise PlanError(f"row {row} runs, but nobody holds it")
        check_rows(
            PlannedRows(
                rows=rows,
                starts=spans.starts,
                ends=spans.ends,
                samples=samples,
                num_tokens=self._num_tokens[rows],
                num_known=self._num_known[rows],
                num_computed=self._num_computed[rows],
                num_page_tokens=self._pages.num_pages(rows) * self._sizes.page_size,
                latest_starts=self._latest_starts[rows],
                has_grammar=self._has_grammar[rows],
            )
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

    def _lay_out(self, spans: Spans) -> StepInputs:
        rows, starts, ends, offsets = spans.rows, spans.starts, spans.ends, spans.offsets
        counts = ends - starts
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


def _latest_start(new: NewRow) -> int:
    """Where the row must begin at the latest, so that it computes all that is wanted of its prompt."""
    if new.prompt.task == Task.EMBED_MEAN:
        return 0
    wants = new.prompt.num_logprobs != NO_LOGPROBS and new.prompt.logprobs_from < new.num_prompt_tokens
    return max(0, new.prompt.logprobs_from - 1) if wants else _ANYWHERE
