"""scheduler: one step while it is planned, and while it is in flight.

A `StepDraft` collects what one forward pass shall do and packs it into the columns of a `StepPlan`; what the core must
remember until the result comes is the `StepInFlight`. Neither decides anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from services.scheduler.admission import CoreLimits
from services.scheduler.chunk_pace import LEAST_COST, PromptBudget
from services.scheduler.formation import March
from services.scheduler.radix_cache import TOKEN_BYTES
from services.scheduler.request import Request
from services.wire.columns import pack_int32, unpack_int32
from services.wire.request_params import PLAIN_PROMPT
from services.wire.steps import NewRow, StepPlan

MAX_NEW_ROW_IDS = 2**20  # token and page ids of new rows in a plan (4 MiB); the row that passes it is the last
MAX_LOGPROB_TOKENS = 2**16  # of prompts whose log-probabilities are wanted, in a step: a result must fit a frame

_TILE_TOKENS = 16  # products take so many at once

FlightRow: TypeAlias = tuple[Request, int, int, int]  # request, row, end, whether it samples: see `StepInFlight`


@dataclass(slots=True)
class StepInFlight:
    """A plan whose result has not come: first the rows in lockstep, then those of the lists, row i in each of them.

    `ends` is how many tokens of the request are computed once it came, `samples` whether it brings a token.
    `new_requests` got their row with it. Of all tokens `num_prompt_tokens` are chunks', which take as long as
    `prompt_cost` tokens at the beginning of a prompt.
    """

    step: int
    num_tokens: int
    marches: Sequence[March]
    requests: list[Request]
    rows: list[int]
    ends: list[int]
    samples: bytes
    new_requests: list[Request]
    num_prompt_tokens: int = 0
    prompt_cost: int = 0

    def apart(self) -> Iterator[FlightRow]:
        """The rows that were planned one by one."""
        return zip(self.requests, self.rows, self.ends, self.samples, strict=True)

    def in_lockstep(self, march: March, places: Iterable[int]) -> Iterator[FlightRow]:
        """Rows in lockstep, by their places."""
        formation = march.formation
        rows, starts = unpack_int32(formation.rows), unpack_int32(formation.starts_of(self.step))
        for place in places:
            yield formation.requests[place], rows[place], starts[place] + 1, 1

    def all_rows(self) -> Iterator[FlightRow]:
        """Every row."""
        for march in self.marches:
            yield from self.in_lockstep(march, range(len(march)))
        yield from self.apart()


@dataclass(slots=True)
class StepDraft:
    """What the next step shall do. Adding a row moves the planned cursors of its request."""

    step: int
    marches: Sequence[March] = ()
    num_tokens: int = 0
    requests: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    samples: bytearray = field(default_factory=bytearray)
    proposals: dict[int, bytes] = field(default_factory=dict)  # by place in these lists: ids as an int32 column
    new_rows: list[NewRow] = field(default_factory=list)
    new_requests: list[Request] = field(default_factory=list)
    num_new_row_ids: int = 0
    num_logprob_tokens: int = 0
    num_prompt_tokens: int = 0
    prompt_cost: int = 0

    def __post_init__(self) -> None:
        """Counts those in lockstep."""
        self.num_tokens += sum(map(len, self.marches))

    @property
    def has_room(self) -> bool:
        """Whether the plan may introduce another request: long cached prompts must not add up to a frame too large."""
        return self.num_new_row_ids < MAX_NEW_ROW_IDS

    def add(self, request: Request, num_new_tokens: int) -> None:
        """Lets a running request compute its next tokens, and sample one when these are its last."""
        start = request.num_planned
        end = start + num_new_tokens
        request.num_planned = end
        request.last_step = self.step
        samples = end == request.num_expected and not request.prompt_end
        if samples:
            request.num_expected = end + 1
        self.num_tokens += num_new_tokens
        self.requests.append(request)
        self.rows.append(request.row)
        self.starts.append(start)
        self.counts.append(num_new_tokens)
        self.ends.append(end)
        self.samples.append(samples)

    def propose(self, place: int, proposal: bytes) -> None:
        """Lets a row that samples compute these ids too, behind its own; its cursors do not count on them."""
        num_ids = len(proposal) // len(_ONE)
        self.proposals[place] = proposal
        self.requests[place].num_proposed = num_ids
        self.counts[place] += num_ids
        self.num_tokens += num_ids

    def add_chunk(self, request: Request, budget: PromptBudget, limits: CoreLimits) -> None:
        """Adds as many of its next tokens as the budget allows, and takes them off it."""
        context = request.num_planned
        most = min(budget.tokens, limits.most_behind(context, budget.cost))
        is_cut = most < request.num_expected - context
        if is_cut and limits.chunk_limit_us and most >= LEAST_COST:
            most -= (self.num_tokens + most) % _TILE_TOKENS
        num_new_tokens = self._add_most(request, most)
        self.num_prompt_tokens += num_new_tokens
        self.prompt_cost += limits.prompt_cost(num_new_tokens, context)
        budget.tokens -= num_new_tokens
        is_full = is_cut and num_new_tokens == most
        budget.cost = 0 if is_full else limits.budget_after(budget.cost, context, num_new_tokens)

    def _add_most(self, request: Request, most: int) -> int:
        """Adds at most so many of its next tokens; returns how many, 0 when the step is full of such rows."""
        num_new_tokens = min(most, request.num_expected - request.num_planned)
        if request.prompt is not None and request.prompt.wants_logprobs:
            num_new_tokens = min(num_new_tokens, MAX_LOGPROB_TOKENS - self.num_logprob_tokens)
            self.num_logprob_tokens += num_new_tokens
        if num_new_tokens:
            request.usage.num_chunks += 1
            self.add(request, num_new_tokens)
        return num_new_tokens

    def add_new_row(self, request: Request) -> None:
        """Introduces a request that was just given its row and pages."""
        self.new_requests.append(request)
        self.num_new_row_ids += request.num_tokens + len(request.pages)
        self.new_rows.append(
            NewRow(
                row=request.row,
                request_id=request.request_id,
                attempt=request.attempt,
                token_ids=bytes(request.token_bytes),
                num_prompt_tokens=request.num_prompt,
                page_ids=pack_int32(request.pages),
                sampling=request.submit.sampling,
                prompt=PLAIN_PROMPT if request.prompt is None else request.prompt.still_wanted(),
            )
        )

    def in_flight(self) -> StepInFlight:
        """What to remember of it."""
        samples = bytes(self.samples)
        return StepInFlight(
            self.step, self.num_tokens, self.marches, self.requests, self.rows, self.ends, samples, self.new_requests,
            self.num_prompt_tokens, self.prompt_cost,
        )  # fmt: skip

    def plan(self, epoch: int, released_rows: list[int], appended: dict[int, list[int]]) -> StepPlan:
        """The message.

        Args:
            epoch: the scheduler's.
            released_rows: rows whose request left since the last plan.
            appended: row -> pages that its table grew by since the last plan.
        """
        if len(self.marches) == 1:  # one detokenizer
            formation = self.marches[0].formation
            rows, starts = formation.rows, formation.starts_of(self.step)
        else:
            rows = b"".join([march.formation.rows for march in self.marches])
            starts = b"".join([march.formation.starts_of(self.step) for march in self.marches])
        num_marching = len(rows) // TOKEN_BYTES
        new_tokens, samples = _ONE * num_marching, b"\1" * num_marching
        if self.requests:
            rows += pack_int32(self.rows)
            starts += pack_int32(self.starts)
            new_tokens += pack_int32(self.counts)
            samples += self.samples
        page_rows = page_counts = page_ids = b""
        if appended:
            pages = appended.values()
            page_rows, page_counts = pack_int32(appended), pack_int32(map(len, pages))
            page_ids = pack_int32(chain.from_iterable(pages))
        return StepPlan(
            epoch=epoch,
            step=self.step,
            released_rows=pack_int32(released_rows) if released_rows else b"",
            new_rows=tuple(self.new_rows),
            page_rows=page_rows,
            page_counts=page_counts,
            page_ids=page_ids,
            rows=rows,
            start_positions=starts,
            num_new_tokens=new_tokens,
            samples=samples,
            proposal_counts=self._proposal_counts(num_marching) if self.proposals else b"",
            proposal_ids=b"".join(self.proposals.values()),
        )

    def _proposal_counts(self, num_marching: int) -> bytes:
        """One count for each row, those in lockstep first."""
        by_place = (len(self.proposals.get(place, b"")) // len(_ONE) for place in range(len(self.rows)))
        return bytes(len(_ONE) * num_marching) + pack_int32(by_place)


_ONE = pack_int32([1])


class CursorError(Exception):
    """Cursors of a request that contradict each other or the plans in flight: a fault of the scheduler."""


def check_cursors(requests: Iterable[Request], in_flight: Iterable[StepInFlight], page_size: int) -> None:
    """CursorError unless each request expects what plans in flight sample, and has pages for what they compute.

    A plan that computes a token before the last known one gives none, though it was let sample.
    """
    num_sampled = Counter(
        request.request_id
        for flight in in_flight
        for request, _, end, samples in flight.all_rows()
        if samples and end >= request.num_tokens
    )
    for request in requests:
        if request.num_expected != request.num_tokens + num_sampled[request.request_id]:
            raise CursorError(f"{request.num_expected} tokens expected of a request that has {request.num_tokens}")
        if not 0 <= request.num_computed <= request.num_planned <= len(request.pages) * page_size:
            raise CursorError(f"{request.num_computed} tokens computed, {len(request.pages)} pages")
