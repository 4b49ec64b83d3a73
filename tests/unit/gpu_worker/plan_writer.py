"""A scheduler small enough for tests: it deals rows and pages, and writes plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.wire.codec import decode, encode
from services.wire.columns import pack_int32, split_by_counts, unpack_float32, unpack_int32, unpack_request_ids
from services.wire.finish import Finish
from services.wire.request_params import PLAIN_PROMPT, PromptParams, SamplingParams
from services.wire.steps import NewRow, PromptLogprobs, StepPlan, StepResult

GREEDY = SamplingParams(0.0, 1.0, 0, 0.0, 0, 0)

Entries = list[tuple[int, float]]
"""Log-probabilities of one token: its own id, then the likeliest ones."""


@dataclass
class Request:
    """One request: what it has, and what has been planned of it."""

    number: int
    prompt: list[int]
    sampling: SamplingParams = GREEDY
    output: list[int] = field(default_factory=list)
    attempt: int = 0
    row: int = -1
    pages: list[int] = field(default_factory=list)
    num_planned: int = 0
    num_expected: int = 0
    finish: Finish = Finish.NONE
    prompt_params: PromptParams = PLAIN_PROMPT
    samples: bool = True  # max_tokens 0: the prompt is computed and nothing else
    logprobs: list[Entries] = field(default_factory=list)
    prompt_logprobs: dict[int, Entries] = field(default_factory=dict)
    embedding: list[float] = field(default_factory=list)

    @property
    def request_id(self) -> bytes:
        return self.number.to_bytes(16, "big")

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output


class PlanWriter:
    """Writes the plans of one epoch."""

    def __init__(self, page_size: int, num_pages: int, max_rows: int, epoch: int = 7, first_step: int = 0) -> None:
        self.epoch = epoch
        self.next_step = first_step
        self.page_size = page_size
        self.free_pages = list(range(num_pages))[::-1]
        self.free_rows = list(range(max_rows))[::-1]
        self._released: list[int] = []
        self._requests: dict[bytes, Request] = {}
        self._proposed: dict[int, int] = {}

    def plan(self, *parts: tuple[Request, int], proposals: Mapping[int, Sequence[int]] | None = None) -> StepPlan:
        """A step in which each request computes so many of its next tokens; it samples when these are its last.

        `proposals`: by number of the request, ids that it computes behind its last ones.
        """
        proposed = [list((proposals or {}).get(request.number, ())) for request, _ in parts]
        new_rows, grown, columns, samples = [], [], [], bytearray()
        for (request, count), ids in zip(parts, proposed, strict=True):
            if ids:
                self._proposed[request.number] = len(ids)
            if request.row < 0:
                new_rows.append(self._introduce(request))
            else:
                grown.append((request.row, self._grow(request)))
            columns.append((request.row, request.num_planned, count))
            request.num_planned += count
            is_last = request.samples and request.num_planned == request.num_expected
            request.num_expected += is_last
            samples.append(is_last)
        grown = [(row, pages) for row, pages in grown if pages]
        plan = StepPlan(
            epoch=self.epoch,
            step=self.next_step,
            released_rows=pack_int32(self._released),
            new_rows=tuple(new_rows),
            page_rows=pack_int32(row for row, _ in grown),
            page_counts=pack_int32(len(pages) for _, pages in grown),
            page_ids=pack_int32(page for _, pages in grown for page in pages),
            rows=pack_int32(row for row, _, _ in columns),
            start_positions=pack_int32(start for _, start, _ in columns),
            num_new_tokens=pack_int32(count + len(ids) for (_, _, count), ids in zip(columns, proposed, strict=True)),
            samples=bytes(samples),
            proposal_counts=pack_int32(map(len, proposed)) if any(proposed) else b"",
            proposal_ids=pack_int32(token_id for ids in proposed for token_id in ids),
        )
        self.next_step += 1
        self._released = []
        decoded = decode(encode(plan))
        assert isinstance(decoded, StepPlan)
        return decoded

    def start_with_prefix(self, request: Request, pages: Sequence[int]) -> None:
        """Before its first plan: lends it pages that hold its first tokens."""
        request.pages = list(pages)
        request.num_planned = len(pages) * self.page_size

    def release(self, request: Request, keeps_pages: bool = False) -> None:
        """The request leaves its row with the next plan; its pages are free at once."""
        self._released.append(request.row)
        self.free_rows.append(request.row)
        if not keeps_pages:
            self.free_pages += request.pages
        request.row, request.pages, request.num_planned = -1, [], 0

    def take(self, result: StepResult) -> None:
        """Gives the requests their new tokens, or the reason why they failed."""
        decoded = decode(encode(result))
        assert decoded == result
        entries = _entries_by_id(result)
        for request_id, attempt, first, ids, finish in zip(
            unpack_request_ids(result.request_ids),
            unpack_int32(result.attempts),
            unpack_int32(result.first_indexes),
            split_by_counts(unpack_int32(result.token_ids), unpack_int32(result.counts)),
            result.finishes,
            strict=True,
        ):
            request = self._requests[request_id]
            own, entries = entries[: len(ids)], entries[len(ids) :]
            assert attempt == request.attempt
            if request.finish:
                continue
            request.finish = Finish(finish)
            assert bool(ids) == (not request.finish) or request.sampling.grammar is not None
            assert first == len(request.output) or not ids
            request.output += ids
            request.logprobs += own
            if proposals := self._proposed.pop(request.number, 0):
                assert len(ids) <= proposals + 1
                request.num_planned += max(0, len(ids) - 1)
            # A row with a grammar, or with proposals that stood, may have got more than was expected.
            request.num_expected = max(request.num_expected, len(request.token_ids))
        for piece in result.prompt_logprobs:
            self._take_piece(piece)
        for embedding in result.embeddings:
            request = self._requests[embedding.request_id]
            assert embedding.attempt == request.attempt
            request.embedding = unpack_float32(embedding.values)

    def _take_piece(self, piece: PromptLogprobs) -> None:
        request = self._requests[piece.request_id]
        assert piece.attempt == request.attempt
        assert piece.first_position == max(request.prompt_logprobs, default=piece.first_position - 1) + 1
        pairs = list(zip(unpack_int32(piece.token_ids), unpack_float32(piece.logprobs), strict=True))
        start = 0
        for position, count in enumerate(unpack_int32(piece.counts), start=piece.first_position):
            request.prompt_logprobs[position] = pairs[start : start + count]
            start += count

    def _introduce(self, request: Request) -> NewRow:
        self._requests[request.request_id] = request
        request.row = self.free_rows.pop()
        request.num_expected = len(request.token_ids)
        self._grow(request)
        return NewRow(
            row=request.row,
            request_id=request.request_id,
            attempt=request.attempt,
            token_ids=pack_int32(request.token_ids),
            num_prompt_tokens=len(request.prompt),
            page_ids=pack_int32(request.pages),
            sampling=request.sampling,
            prompt=request.prompt_params,
        )

    def _grow(self, request: Request) -> list[int]:
        num_tokens = request.num_expected + self._proposed.get(request.number, 0)
        missing = -(-num_tokens // self.page_size) - len(request.pages)
        pages = [self.free_pages.pop() for _ in range(missing)]
        request.pages += pages
        return pages


def _entries_by_id(result: StepResult) -> list[Entries]:
    """For each id of a result its log-probabilities; none where the result has no such columns."""
    if not result.logprob_counts:
        return [[] for _ in range(len(result.token_ids) // 4)]
    pairs = list(zip(unpack_int32(result.logprob_ids), unpack_float32(result.logprobs), strict=True))
    entries, start = [], 0
    for count in unpack_int32(result.logprob_counts):
        entries.append(pairs[start : start + count])
        start += count
    return entries
