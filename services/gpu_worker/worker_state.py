"""gpu_worker: the rows that requests hold, and how a plan becomes the tensors of a step.

A request keeps one row for as long as it runs. By row lie on the device: the last token, the page table, and what the
request wants of its logits (`step_work`). The host keeps what it can know without waiting for the device: how many
tokens a row has and how many are computed. So plan k + 1 is laid out before result k is read: a decoding row's input id
is taken from the device, where the sampler of step k has put it.

A row with a grammar may get ids that nobody sampled. A plan that was made before that was known computes its tokens,
and samples only if these are the row's last ones: see `pick`.

It owns these rows. It never decides what runs and never frees a page; a plan that does not fit them is the scheduler's
fault, and after it nothing here can be trusted: `PlanError` ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.gpu_worker.grammar_seam import Grammars, MaskJob
from services.gpu_worker.held_rows import HeldRows, WorkerSizes
from services.gpu_worker.last_tokens import LastTokens
from services.gpu_worker.page_table import PageTable
from services.gpu_worker.plan_check import PlanError
from services.gpu_worker.prepared_step import PreparedStep, Spans, StepRows
from services.gpu_worker.proposals import Proposals, Verified, followers, proposal_counts
from services.gpu_worker.row_lines import Picks
from services.gpu_worker.step_inputs import StepInputs
from services.gpu_worker.step_work import RowOptions, StepOutput, StepWork
from services.gpu_worker.uploads import Int64s, int64_column, int64_columns
from services.wire.finish import Finish
from services.wire.steps import NewRow, StepPlan

Int32s = npt.NDArray[np.int32]
_NONE = int(Finish.NONE)


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
        self._last_tokens = LastTokens(sizes.max_rows, device)
        self._held = HeldRows(sizes)
        self.num_failed_rows = 0
        """Rows that failed so far."""

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
        pages_to_clear = self._release(int64_column(plan.released_rows).tolist()) if plan.released_rows else []
        if plan.new_rows:
            token_ids = [self._set_up(new_row).astype(np.int64) for new_row in plan.new_rows]
            self.options.set_rows(plan.new_rows, token_ids)
        if plan.page_rows:
            self._append_pages(plan)
        self._pages.commit()
        if not plan.rows:
            return None
        rows, starts, counts = int64_columns(plan.rows, plan.start_positions, plan.num_new_tokens)
        samples = np.frombuffer(plan.samples, dtype=np.bool_)
        num_proposed = proposal_counts(plan)
        spans = Spans.of(rows, starts, counts, num_proposed)
        self._held.check(spans, samples, num_proposed, self._pages.num_pages(rows) * self._sizes.page_size)
        step_rows = self._held.step_rows(spans, samples)
        proposals = self._proposals(plan, spans, num_proposed)
        inputs = self._lay_out(spans, counts, proposals)
        self._held.note_computed(spans, proposals)
        has_grammar = self._held.any_has_grammar(rows)
        return PreparedStep(inputs, spans, step_rows, pages_to_clear, has_grammar, proposals)

    def pick(self, step: PreparedStep) -> Picks:
        """The rows of a step that pick a token; they then count as sampled, whatever becomes of the step.

        A row that got ids without sampling them since its plan was made picks none, unless these were computed too.
        """
        return self._held.pick(step.spans, step.rows.samples)

    def keep(self, work: StepWork, output: StepOutput) -> None:
        """Makes what a whole step has picked the last tokens of its rows, and keeps what the next steps need of it."""
        self._last_tokens.keep(work.picks, output.tokens.token_ids)
        self.options.keep(work, output)

    def note_failures(self, rows: StepRows, finishes: Sequence[int]) -> None:
        """Counts rows that failed, each once, and remembers which pages they have spoiled, until they are released.

        With plans ahead a row that has failed runs in further steps, and fails in these too.
        """
        for place, finish in enumerate(finishes):
            held = self._held.holder(rows, place) if finish != _NONE else None
            if held is None:
                continue
            self.num_failed_rows += not held.has_failed
            held.has_failed = True
            if finish == Finish.NUMERICAL_ERROR:
                page = int(rows.starts[place]) // self._sizes.page_size
                held.failed_page = page if held.failed_page is None else min(page, held.failed_page)

    # ------------------------------------------------------------ grammars

    def begin_masks(self, picks: Picks) -> tuple[Picks, MaskJob] | None:
        """Starts to make the masks of the rows that have a grammar; None if no row has."""
        with_grammar = picks.select(self._held.has_grammar[picks.rows])
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
            bool(self._held.has_grammar[row]) and self._held.holder(rows, place) is not None
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
                self._held.append(row, position, [token_id, *fitting])
                self.options.append(row, np.array(fitting, dtype=np.int64))
        return forced

    # ------------------------------------------------------------ proposals

    def verify(self, rows: StepRows, proposals: Proposals, output: StepOutput) -> Verified:
        """Decides which proposals of a step stand, once its output is on the host; the rows then have these tokens.

        Of a step that was run row by row nothing was sampled behind proposals, and none of them stands.
        """
        picked, verified = output.tokens.token_ids.tolist(), output.verified
        found = Verified({}, [])
        for place, own in proposals.by_place():
            sampled, is_failed = ([], []) if verified is None else verified.lists(own)
            ids = followers(proposals.token_ids[own].tolist(), picked[place], sampled, is_failed)
            if ids:
                found.followers[place] = ids
            if self._held.holder(rows, place) is None:
                continue
            row, position = int(rows.rows[place]), int(proposals.positions[own.start]) - 1
            self._held.note_verified(row, position, [picked[place], *ids])
            if any(is_failed):
                spoiled = proposals.positions[own][len(ids) :] - 1
                slots = self._pages.slots(np.repeat(row, len(spoiled)), spoiled, self._sizes.page_size)
                found.spoiled_slots.extend(slots.tolist())
        return found

    def _proposals(self, plan: StepPlan, spans: Spans, num_proposed: Int64s | None) -> Proposals | None:
        if num_proposed is None or not plan.proposal_ids:
            return None
        token_ids = int64_column(plan.proposal_ids)
        if token_ids.min() < 0 or token_ids.max() >= self._sizes.vocab_size:
            raise PlanError(f"ids outside [0, {self._sizes.vocab_size}) are proposed")
        return spans.followed_by(num_proposed, token_ids)

    # ------------------------------------------------------------ what a plan changes

    def _release(self, rows: list[int]) -> list[int]:
        """Forgets rows; returns the pages that must be cleared before somebody else reads them."""
        spoiled: list[int] = []
        for row in rows:
            held = self._held.remove(row)
            if self._held.has_grammar[row] and self._grammars is not None:
                self._grammars.release(row)
            if held.failed_page is not None:
                spoiled += self._pages.line(row)[held.failed_page :]
        return spoiled

    def _set_up(self, new: NewRow) -> Int32s:
        """A request takes a row; returns its ids."""
        held = self._held.add(new)
        if new.sampling.grammar is not None:
            if self._grammars is None:
                raise PlanError(f"row {new.row} has a grammar; this worker has none")
            self._grammars.set_up(new)
        self._pages.clear(new.row)
        self._add_pages(new.row, np.frombuffer(new.page_ids, dtype="<i4"))
        return held.token_ids

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

    def _lay_out(self, spans: Spans, counts: Int64s, proposals: Proposals | None) -> StepInputs:
        """`counts`: tokens of each row, its own and proposals."""
        rows, starts, offsets = spans.rows, spans.starts, spans.offsets
        positions, row_of, lengths = starts, rows, counts.tolist()
        if (num_tokens := sum(lengths)) > len(rows):
            positions, row_of = np.arange(num_tokens) + np.repeat(starts - offsets, counts), np.repeat(rows, counts)
        slots = self._pages.slots(row_of, positions, self._sizes.page_size)
        on_host, is_on_device = self._held.known_ids(spans, proposals)
        wanted = spans.ends - starts + offsets - 1
        if proposals is not None:
            wanted = np.concatenate([wanted, proposals.offsets])
        input_ids, on_positions, slot_mapping, last_tokens, step_rows = self._last_tokens.upload_inputs(
            on_host, (offsets[is_on_device], rows[is_on_device]), [positions, slots, wanted, rows]
        )
        ends = starts + counts
        return StepInputs(
            input_ids=input_ids,
            positions=on_positions,
            slot_mapping=slot_mapping,
            page_table=self._pages.gather(rows, step_rows, -(-int(ends.max()) // self._sizes.page_size)),
            query_lengths=tuple(lengths),
            context_lengths=tuple(ends.tolist()),
            sample_indices=last_tokens,
        )
