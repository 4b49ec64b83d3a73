"""A worker without a model: it keeps real page tables over a real (small) KV memory of token ids.

The next token is a hash of (seed, choice, every id read back through the page table). So a page that was freed too
early, shared wrongly, or never written changes the answer, exactly as it would with a model. Each plan is checked
against the contract of the wire before it runs, and runs at once; its result waits until the test delivers it.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from random import Random

from services.wire.codec import decode, encode
from services.wire.columns import pack_float32, pack_int32, split_by_counts, unpack_int32
from services.wire.finish import Finish
from services.wire.request_params import (
    Grammar,
    GrammarKind,
    LogitRules,
    PromptParams,
    SamplingParams,
    Task,
    TextParams,
)
from services.wire.requests import Submit
from services.wire.steps import Embedding, NewRow, PromptLogprobs, StepPlan, StepResult

VOCAB_SIZE = 50
NOT_A_NUMBER = -7


def next_token(sampling: SamplingParams, tokens: bytes) -> int:
    """The token after `tokens` (int32 bytes).

    A negative seed writes a text that repeats itself: mostly, the last two tokens decide on the next.
    """
    if sampling.seed < 0 and len(tokens) // 4 % -sampling.seed:
        return zlib.crc32(tokens[-8:]) % 6
    return zlib.crc32(tokens, zlib.crc32(f"{sampling.seed} {sampling.choice}".encode())) % VOCAB_SIZE


def logprobs_of(sampling: SamplingParams, tokens: bytes, token_id: int) -> list[tuple[int, float]]:
    """What the worker says of `token_id` after `tokens`: itself, then as many others as were asked for."""
    ids = [token_id, *((token_id + i) % VOCAB_SIZE for i in range(1, sampling.num_logprobs + 1))]
    return [(i, -float(zlib.crc32(tokens, i) % 1024)) for i in ids if sampling.num_logprobs >= 0]


def solo_logprobs(submit: Submit, token_ids: list[int]) -> list[list[tuple[int, float]]]:
    """The log-probabilities of an answer's ids when it runs alone."""
    tokens = submit.prompt_token_ids + pack_int32(token_ids)
    return [
        logprobs_of(submit.sampling, tokens[: len(submit.prompt_token_ids) + 4 * i], token_id)
        for i, token_id in enumerate(token_ids)
    ]


def prompt_entries(submit: Submit) -> list[tuple[int, list[tuple[int, float]]]]:
    """(position, entries) for each prompt token whose log-probabilities a request wants, when it runs alone."""
    wish, prompt = submit.prompt, submit.prompt_token_ids
    if wish.num_logprobs < 0:
        return []
    positions = range(max(wish.logprobs_from, 1), len(prompt) // 4)
    return [(p, _prompt_logprobs(wish, prompt[: 4 * p], prompt[4 * p : 4 * p + 4])) for p in positions]


def _prompt_logprobs(wish: PromptParams, tokens: bytes, own: bytes) -> list[tuple[int, float]]:
    ask = SamplingParams(0.0, 1.0, 0, 0.0, 0, 0, num_logprobs=wish.num_logprobs)
    return logprobs_of(ask, tokens, unpack_int32(own)[0])


def hidden_state(tokens: bytes) -> float:
    """What stands for the hidden state of the last of `tokens`; whole, so that sums are exact in float32."""
    return float(zlib.crc32(tokens) % 1024)


def solo_embedding(submit: Submit) -> list[float]:
    """The embedding of a request that runs alone; empty when it wants none."""
    prompt = submit.prompt_token_ids
    states = [hidden_state(prompt[: 4 * end]) for end in range(1, len(prompt) // 4 + 1)]
    pooled = {Task.GENERATE: [], Task.EMBED_LAST: states[-1:], Task.EMBED_MEAN: [sum(states)]}
    return pooled[submit.prompt.task]


def solo_output(submit: Submit, max_total_tokens: int) -> tuple[list[int], Finish]:
    """What a request gives when it runs alone, without pages, caches or plans."""
    stop_ids = set(unpack_int32(submit.stop_token_ids))
    tokens = submit.prompt_token_ids + submit.output_token_ids
    output = unpack_int32(submit.output_token_ids)
    if submit.prompt.task is not Task.GENERATE:
        return [], Finish.LENGTH
    most = min(submit.max_tokens, max_total_tokens - len(submit.prompt_token_ids) // 4)
    while len(output) < most:
        token_id = next_token(submit.sampling, tokens)
        output.append(token_id)
        tokens += pack_int32([token_id])
        if token_id in stop_ids and len(output) > submit.text.min_tokens:
            return output, Finish.STOP_TOKEN
    return output, Finish.LENGTH


def grammar_of(regex: object) -> Grammar | None:
    """The grammar of a regular expression."""
    return None if regex is None else Grammar(GrammarKind.REGEX, str(regex))


def new_submit(
    request_id: int,
    prompt_ids: list[int],
    max_tokens: int,
    stop_token_ids: tuple[int, ...] = (),
    group_id: int | None = None,
    **other: object,
) -> Submit:
    """A Submit with small numbers for ids.

    `other`: output_token_ids, min_tokens, choice, num_logprobs, grammar (a regex), seed, has_rules, or fields of Submit
    by their names.
    """
    outputs = other.pop("output_token_ids", [])
    assert isinstance(outputs, list)
    fields: dict[str, object] = {
        "attempt": 0,
        "tenant": "",
        "cache_root": b"",
        "priority": 0,
        "deadline_ms": 0,
        "text": TextParams((), False, True, int(str(other.pop("min_tokens", 0)))),
        "sampling": SamplingParams(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=int(str(other.pop("seed", 7))),
            choice=int(str(other.pop("choice", 0))),
            grammar=grammar_of(other.pop("grammar", None)),
            num_logprobs=int(str(other.pop("num_logprobs", -1))),
            rules=LogitRules(frequency_penalty=0.5) if other.pop("has_rules", False) else None,
        ),
    }
    return Submit(
        request_id=request_id.to_bytes(16, "big"),
        prompt_token_ids=pack_int32(prompt_ids),
        output_token_ids=pack_int32(outputs),
        max_tokens=max_tokens,
        stop_token_ids=pack_int32(stop_token_ids),
        group_id=(request_id if group_id is None else group_id).to_bytes(16, "big"),
        **(fields | other),  # type: ignore[arg-type]
    )


@dataclass
class FakeRow:
    request_id: bytes
    attempt: int
    tokens: bytearray
    num_prompt: int
    pages: list[int]
    sampling: SamplingParams
    prompt: PromptParams
    num_computed: int = -1  # unknown until the first plan says where it starts
    state_sum: float = 0.0  # of the hidden states computed in this row
    jumped_step: int = -1  # the last step that gave it more than one id
    verified_step: int = -1  # the last step in which it had proposals


@dataclass
class FakeWorker:
    """Runs plans in order; `results` holds what was not delivered yet."""

    num_pages: int
    page_size: int
    max_rows: int
    token_budget: int
    nan_requests: set[bytes] = field(default_factory=set)
    rows: dict[int, FakeRow] = field(default_factory=dict)
    results: deque[StepResult] = field(default_factory=deque)
    step_tokens: list[list[int]] = field(default_factory=list)
    """For each step, how many tokens each of its rows computed."""
    jumps: Random | None = None
    """Decides where a row's next ids are forced, so that it gives several at once; None: nowhere."""
    num_jumps: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    lockstep_beside: int = 0
    """Steps with proposals in which other rows had none."""

    def __post_init__(self) -> None:
        self.memory = array("i", [NOT_A_NUMBER]) * (self.num_pages * self.page_size)
        self.next_step = 0
        self.num_delivered = 0

    def run(self, sent: StepPlan) -> None:
        """Takes a plan as the wire would bring it and computes it."""
        plan = decode(encode(sent))
        assert isinstance(plan, StepPlan)
        assert plan.step == self.next_step
        self.next_step += 1
        for row in unpack_int32(plan.released_rows):
            del self.rows[row]
        for new_row in plan.new_rows:
            self._set_up(new_row)
        runs = split_by_counts(unpack_int32(plan.page_ids), unpack_int32(plan.page_counts))
        for row, pages in zip(unpack_int32(plan.page_rows), runs, strict=True):
            assert pages
            self.rows[row].pages += pages
        self._check_tables()
        self._compute(plan)

    def deliver(self) -> StepResult:
        """The oldest result, as the wire would bring it."""
        self.num_delivered += 1
        result = decode(encode(self.results.popleft()))
        assert isinstance(result, StepResult)
        return result

    def _set_up(self, new_row: NewRow) -> None:
        assert new_row.row not in self.rows
        assert 0 <= new_row.row < self.max_rows
        self.rows[new_row.row] = FakeRow(
            new_row.request_id,
            new_row.attempt,
            bytearray(new_row.token_ids),
            new_row.num_prompt_tokens,
            unpack_int32(new_row.page_ids),
            new_row.sampling,
            new_row.prompt,
        )

    def _check_tables(self) -> None:
        for row in self.rows.values():
            assert len(set(row.pages)) == len(row.pages)
            assert all(0 <= page < self.num_pages for page in row.pages)

    def _compute(self, plan: StepPlan) -> None:
        rows, starts = unpack_int32(plan.rows), unpack_int32(plan.start_positions)
        counts = unpack_int32(plan.num_new_tokens)
        assert rows or (plan.released_rows and not self.rows)  # an empty step only to let go of the last rows
        assert len(set(rows)) == len(rows)
        assert all(count >= 1 for count in counts)
        assert sum(counts) <= self.token_budget
        if rows:
            self.step_tokens.append(counts)
        self.pieces: list[PromptLogprobs] = []
        self.embeddings: list[Embedding] = []
        proposals = split_by_counts(
            unpack_int32(plan.proposal_ids), unpack_int32(plan.proposal_counts) or [0] * len(rows)
        )
        self.lockstep_beside += any(proposals) and not all(proposals)
        sampled = [
            self._verify_row(row, start, count, proposal)
            if proposal
            else self._compute_row(row, start, count, bool(samples))
            for row, start, count, samples, proposal in zip(rows, starts, counts, plan.samples, proposals, strict=True)
        ]
        result = _result(plan, [outcome for outcome in sampled if outcome is not None])
        self.results.append(replace(result, prompt_logprobs=tuple(self.pieces), embeddings=tuple(self.embeddings)))

    def _compute_row(self, number: int, start: int, count: int, samples: bool) -> _Sampled | None:
        row = self.rows[number]
        end = start + count
        num_known = len(row.tokens) // 4
        assert row.num_computed in (start, -1)
        assert row.verified_step < self.num_delivered  # the scheduler knows what came of its proposals
        assert end <= num_known
        assert end <= len(row.pages) * self.page_size
        is_silent = end == num_known and not samples  # a request that produces nothing
        if samples and end < num_known:  # planned before the result came that brought several ids: it gives none
            assert row.jumped_step >= self.num_delivered
            samples = False
            is_told = self.jumps is not None and self.jumps.random() < 0.5
        else:
            assert samples == (end == num_known) or (is_silent and end >= row.num_prompt)
            is_told = False
        if row.num_computed < 0:
            wants_logprobs = row.prompt.num_logprobs >= 0 and row.prompt.logprobs_from < row.num_prompt
            assert not wants_logprobs or start < row.prompt.logprobs_from
            assert row.prompt.task is not Task.EMBED_MEAN or start == 0
        row.num_computed = end
        is_nan = (samples or is_silent) and row.request_id in self.nan_requests
        new_ids = [NOT_A_NUMBER] * count if is_nan else unpack_int32(bytes(row.tokens[4 * start : 4 * end]))
        for position, token_id in zip(range(start, end), new_ids, strict=True):
            self.memory[row.pages[position // self.page_size] * self.page_size + position % self.page_size] = token_id
        if is_silent and (is_nan or NOT_A_NUMBER in array("i", self._read(row, end))):
            return _Sampled(number, row, 0, [], [], Finish.NUMERICAL_ERROR)
        self._tell_prompt(row, start, end)
        if not samples:
            return _Sampled(number, row, num_known - row.num_prompt, [], []) if is_told else None
        first_index = num_known - row.num_prompt
        read = self._read(row, end)
        is_nan = is_nan or NOT_A_NUMBER in array("i", read)
        if is_nan:
            row.tokens += pack_int32([0])
            return _Sampled(number, row, first_index, [], [], Finish.NUMERICAL_ERROR)
        num_ids = self._num_ids(row, read)
        for _ in range(num_ids):
            token_id = next_token(row.sampling, bytes(row.tokens))
            row.tokens += pack_int32([token_id])
        ids = unpack_int32(bytes(row.tokens[-4 * num_ids :]))
        before = [bytes(row.tokens[: 4 * (num_known + i)]) for i in range(num_ids)]
        logprobs = [logprobs_of(row.sampling, tokens, each) for tokens, each in zip(before, ids, strict=True)]
        return _Sampled(number, row, first_index, ids, logprobs)

    def _verify_row(self, number: int, start: int, count: int, proposal: list[int]) -> _Sampled | None:
        """A row with proposals: samples after its own last token and after each proposal that is what it sampled."""
        row, num_own = self.rows[number], count - len(proposal)
        assert row.sampling.rules is None
        assert row.sampling.grammar is None
        assert start + count <= len(row.pages) * self.page_size
        jumps, self.jumps = self.jumps, None
        outcome = self._compute_row(number, start, num_own, samples=True)
        self.jumps = jumps
        row.verified_step = self.next_step - 1
        assert outcome is not None
        for position, token_id in enumerate(proposal, start + num_own):
            self.memory[row.pages[position // self.page_size] * self.page_size + position % self.page_size] = token_id
        self.num_proposed += len(proposal)
        for token_id in proposal if outcome.token_ids else []:
            if token_id != outcome.token_ids[-1]:
                break
            row.num_computed += 1
            self.num_accepted += 1
            assert self._read(row, row.num_computed) == bytes(row.tokens)
            outcome.token_ids.append(next_token(row.sampling, bytes(row.tokens)))
            outcome.logprobs.append([])
            row.tokens += pack_int32(outcome.token_ids[-1:])
        return outcome

    def _tell_prompt(self, row: FakeRow, start: int, end: int) -> None:
        """What is wanted of the prompt, from what stands in the pages."""
        read, wish = self._read(row, end), row.prompt
        if NOT_A_NUMBER in array("i", read):
            return
        positions = range(max(wish.logprobs_from, start + 1), min(end + 1, row.num_prompt))
        if wish.num_logprobs >= 0 and positions:
            own = bytes(row.tokens)
            entries = [_prompt_logprobs(wish, read[: 4 * p], own[4 * p : 4 * p + 4]) for p in positions]
            flat = [pair for each in entries for pair in each]
            ids, values = pack_int32(token_id for token_id, _ in flat), pack_float32(value for _, value in flat)
            counts = pack_int32(map(len, entries))
            self.pieces.append(PromptLogprobs(row.request_id, row.attempt, positions.start, counts, ids, values))
        states = [hidden_state(read[: 4 * i]) for i in range(start + 1, end + 1)]
        row.state_sum += sum(states)
        if wish.task is not Task.GENERATE and end == row.num_prompt:
            pooled = states[-1] if wish.task is Task.EMBED_LAST else row.state_sum
            self.embeddings.append(Embedding(row.request_id, row.attempt, pack_float32([pooled])))

    def _num_ids(self, row: FakeRow, read: bytes) -> int:
        """How many ids a row gives; what it read from its pages must be its tokens."""
        assert read == bytes(row.tokens)
        if self.jumps is None or self.jumps.random() < 0.7:
            return 1
        row.jumped_step = self.next_step - 1
        self.num_jumps += 1
        return self.jumps.randrange(2, 9)

    def _read(self, row: FakeRow, num_tokens: int) -> bytes:
        size = self.page_size
        return b"".join(self.memory[page * size : (page + 1) * size].tobytes() for page in row.pages)[: 4 * num_tokens]


@dataclass
class _Sampled:
    number: int
    row: FakeRow
    first_index: int
    token_ids: list[int]
    logprobs: list[list[tuple[int, float]]]
    finish: Finish = Finish.NONE


def _result(plan: StepPlan, sampled: list[_Sampled]) -> StepResult:
    entries = [logprobs for outcome in sampled for logprobs in outcome.logprobs]
    asks = any(entries)
    return StepResult(
        epoch=plan.epoch,
        step=plan.step,
        rows=pack_int32(outcome.number for outcome in sampled),
        request_ids=b"".join(outcome.row.request_id for outcome in sampled),
        attempts=pack_int32(outcome.row.attempt for outcome in sampled),
        first_indexes=pack_int32(outcome.first_index for outcome in sampled),
        counts=pack_int32(len(outcome.token_ids) for outcome in sampled),
        token_ids=pack_int32(token_id for outcome in sampled for token_id in outcome.token_ids),
        finishes=bytes(outcome.finish for outcome in sampled),
        forward_us=1,
        step_us=1,
        logprob_counts=pack_int32(map(len, entries)) if asks else b"",
        logprob_ids=pack_int32(token_id for logprobs in entries for token_id, _ in logprobs),
        logprobs=pack_float32(value for logprobs in entries for _, value in logprobs),
    )
