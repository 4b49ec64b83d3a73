"""gpu_worker: who holds which row, and how far each has come, on the host.

    row's tokens   [ 0 ........ known on the host ........ )[ sampled since: on the device  )
                   [ computed ........ )[ this step: start, start + n )

It owns these numbers and nothing on the device; `worker_state` keeps the two together.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.gpu_worker.plan_check import NOT_STARTED, PlanError, PlannedRows, check_rows, only_go_on
from services.gpu_worker.prepared_step import Spans, StepRows
from services.gpu_worker.proposals import Proposals
from services.gpu_worker.row_lines import Bools, Picks
from services.gpu_worker.uploads import Int64s
from services.runtime.logs import about
from services.wire.request_params import NO_LOGPROBS, Task
from services.wire.steps import NewRow

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
class HeldRow:
    """A request that holds a row.

    Attributes:
        request_id, attempt: whose it is.
        token_ids: what is known of its tokens on the host.
        is_refused: whether it came with ids that the model does not have.
        has_failed: whether a step that it was part of has failed for it.
        failed_page: the first page (its place in the line) that may hold what is not finite, of a row that failed.
    """

    request_id: bytes
    attempt: int
    token_ids: Int32s
    is_refused: bool
    has_failed: bool = False
    failed_page: int | None = None


class HeldRows:
    """The rows [0, max_rows) of a worker."""

    def __init__(self, sizes: WorkerSizes) -> None:
        self._sizes = sizes
        self._held: dict[int, HeldRow] = {}
        self._num_with_grammar = 0
        # By row, for all rows of a step at once; of rows that nobody holds they mean nothing.
        self._numbers = np.zeros((5, sizes.max_rows), dtype=np.int64)
        self._num_tokens, self._num_known, self._num_prompt, self._num_computed, self._latest_starts = self._numbers
        self._flags = np.zeros((3, sizes.max_rows), dtype=np.bool_)
        self.has_grammar, self._can_verify, self._is_open = self._flags
        """[max_rows] each; the first: whether the answer has one."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, row: object) -> bool:
        return row in self._held

    def clear(self) -> None:
        """Nobody holds a row any more."""
        self._held.clear()
        self._num_with_grammar = 0

    def add(self, new: NewRow) -> HeldRow:
        """A request takes a row.

        Raises:
            PlanError: the row is not free, or the request does not fit.
        """
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
        held = self._held[new.row] = HeldRow(new.request_id, new.attempt, token_ids, is_refused)
        self._num_tokens[new.row] = self._num_known[new.row] = len(token_ids)
        self._num_prompt[new.row] = new.num_prompt_tokens
        self._num_computed[new.row] = NOT_STARTED
        self._latest_starts[new.row] = _latest_start(new)
        self.has_grammar[new.row] = new.sampling.grammar is not None
        self._num_with_grammar += new.sampling.grammar is not None
        self._can_verify[new.row] = _can_verify(new)
        self._is_open[new.row] = False
        return held

    def remove(self, row: int) -> HeldRow:
        """The request leaves; PlanError if there is none."""
        held = self._held.pop(row, None)
        if held is None:
            raise PlanError(f"row {row} is released, but nobody holds it")
        self._num_with_grammar -= int(self.has_grammar[row])
        return held

    def any_has_grammar(self, rows: Int64s) -> bool:
        """Whether the answer of any of these rows has a grammar."""
        return self._num_with_grammar > 0 and bool(self.has_grammar[rows].any())

    def holder(self, rows: StepRows, place: int) -> HeldRow | None:
        """The row of a step, if it is still held by the same request."""
        held = self._held.get(int(rows.rows[place]))
        holder = (rows.request_ids[place], rows.attempts[place])
        return held if held is not None and (held.request_id, held.attempt) == holder else None

    def check(self, spans: Spans, samples: Bools, num_proposed: Int64s | None, num_page_tokens: Int64s) -> None:
        """PlanError unless these rows continue what is held; `num_page_tokens`: what their pages have room for."""
        rows = spans.rows
        row_numbers = rows.tolist()
        if len(set(row_numbers)) != len(row_numbers):
            raise PlanError("a row runs twice in one step")
        for row in row_numbers:
            if row not in self._held:
                raise PlanError(f"row {row} runs, but nobody holds it")
        num_tokens, num_known, _, num_computed, latest_starts = self._numbers[:, rows]
        has_grammar, can_verify, is_open = self._flags[:, rows]
        planned = PlannedRows(
            rows=rows,
            starts=spans.starts,
            ends=spans.ends,
            samples=samples,
            num_tokens=num_tokens,
            num_known=num_known,
            num_computed=num_computed,
            num_page_tokens=num_page_tokens,
            latest_starts=latest_starts,
            has_grammar=has_grammar,
            num_proposed=np.zeros_like(rows) if num_proposed is None else num_proposed,
            can_verify=can_verify,
            is_open=is_open,
        )
        if num_proposed is not None or not only_go_on(planned):
            check_rows(planned)

    def step_rows(self, spans: Spans, samples: Bools) -> StepRows:
        """The rows of a step as its result names them."""
        rows = spans.rows
        held = [self._held[row] for row in rows.tolist()]
        return StepRows(
            rows=rows,
            request_ids=[each.request_id for each in held],
            attempts=[each.attempt for each in held],
            first_indexes=self._num_tokens[rows] - self._num_prompt[rows],
            starts=spans.starts,
            samples=samples,
            is_refused=[each.is_refused for each in held],
        )

    def known_ids(self, spans: Spans, proposals: Proposals | None) -> tuple[Int64s, Bools]:
        """The ids that a step computes, one after another, and [num_rows] whose one own id is on the device."""
        is_on_device = spans.starts >= self._num_known[spans.rows]
        num_proposed = 0 if proposals is None else len(proposals.token_ids)
        on_host = np.zeros(int((spans.ends - spans.starts).sum()) + num_proposed, dtype=np.int64)
        if proposals is not None:
            on_host[proposals.offsets] = proposals.token_ids
        for place in (~is_on_device).nonzero()[0].tolist():
            start, end, offset = int(spans.starts[place]), int(spans.ends[place]), int(spans.offsets[place])
            on_host[offset : offset + end - start] = self._held[int(spans.rows[place])].token_ids[start:end]
        return on_host, is_on_device

    def note_computed(self, spans: Spans, proposals: Proposals | None) -> None:
        """The tokens of a step count as computed; proposals do not before they are verified."""
        self._num_computed[spans.rows] = spans.ends
        if proposals is not None:
            self._is_open[proposals.rows] = True

    def note_verified(self, row: int, position: int, token_ids: list[int]) -> None:
        """What came of a row's proposals: its tokens from this position on are these, computed up to the last one."""
        self._is_open[row] = False
        if len(token_ids) > 1:
            self.append(row, position, token_ids)
            self._num_computed[row] = position + len(token_ids) - 1

    def pick(self, spans: Spans, samples: Bools) -> Picks:
        """The rows that pick a token: those that are asked to, and end where their tokens end; they are longer then."""
        places = (samples & (spans.ends == self._num_tokens[spans.rows])).nonzero()[0]
        rows = spans.rows[places]
        positions = self._num_tokens[rows]
        self._num_tokens[rows] += 1
        return Picks(places, places, rows, positions, positions - self._num_prompt[rows])

    def append(self, row: int, position: int, token_ids: list[int]) -> None:
        """The row's tokens from this position on are these; those in between are computed, nobody reads them again."""
        held = self._held[row]
        known = np.zeros(position + len(token_ids), dtype=np.int32)
        known[: len(held.token_ids)] = held.token_ids
        known[position:] = token_ids
        held.token_ids = known
        self._num_tokens[row] = self._num_known[row] = len(known)


def _latest_start(new: NewRow) -> int:
    """Where the row must begin at the latest, so that it computes all that is wanted of its prompt."""
    if new.prompt.task == Task.EMBED_MEAN:
        return 0
    wants = new.prompt.num_logprobs != NO_LOGPROBS and new.prompt.logprobs_from < new.num_prompt_tokens
    return max(0, new.prompt.logprobs_from - 1) if wants else _ANYWHERE


def _can_verify(new: NewRow) -> bool:
    """Whether a token depends on nothing but the logits of its place, and nothing more is wanted of these."""
    sampling = new.sampling
    return sampling.rules is None and sampling.grammar is None and sampling.num_logprobs == NO_LOGPROBS
