"""Drives a core and a fake worker, keeps what each client would have received, and checks it against the solo run."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.admission import CoreLimits
from services.scheduler.core import Core
from services.scheduler.outcomes import Produced
from services.scheduler.policy import RemainderEstimate
from services.scheduler.prompt_record import PromptPart
from services.scheduler.proposer import SpeculationLimits
from services.scheduler.request import Request
from services.wire.columns import unpack_float32, unpack_int32
from services.wire.finish import Finish
from services.wire.requests import Submit
from services.wire.steps import CompileGrammar, Embedding, GrammarCompiled
from tests.unit.scheduler.fake_worker import (
    VOCAB_SIZE,
    FakeWorker,
    prompt_entries,
    solo_embedding,
    solo_logprobs,
    solo_output,
)

EPOCH = 0x1234


def new_limits(
    num_pages: int, page_size: int, speculation: SpeculationLimits | None = None, **other: int
) -> CoreLimits:
    """Limits for tests: chunks of 16 tokens, 8 rows, no plan ahead, unless `other` says so."""
    fields = {
        "max_model_len": 8192,
        "vocab_size": VOCAB_SIZE,
        "logits_width": VOCAB_SIZE,
        "max_rows": 8,
        "token_budget": 24,
        "chunk_tokens": 16,
        "max_waiting": 1000,
        "plans_ahead": 0,
    }
    return CoreLimits(
        num_pages=num_pages, page_size=page_size, caches_prefixes=True, speculation=speculation, **(fields | other)
    )


@dataclass
class Answer:
    """What the client of a request got."""

    request: Request
    token_ids: list[int]
    finish: Finish = Finish.NONE


class RecklessEstimate(RemainderEstimate):
    """Expects no answer to grow, so that far too much is admitted and retraction happens all the time."""

    def expected_tokens(self, num_remaining: int) -> int:
        """Nothing."""
        return 0


@dataclass
class Driver:
    """One core and its worker. Every event is followed by a check of the invariants."""

    limits: CoreLimits
    is_reckless: bool = False
    in_lockstep: bool = True
    answers: dict[bytes, Answer] = field(default_factory=dict)
    asks: list[CompileGrammar] = field(default_factory=list)
    """Grammars that the worker was asked for and has not answered."""
    prompt_parts: dict[bytes, list[PromptPart]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = self.limits
        self.core = Core(limits, EPOCH, self.in_lockstep)
        if self.is_reckless:
            self.core.reservations.estimate = RecklessEstimate()
        self.worker = FakeWorker(limits.num_pages, limits.page_size, limits.max_rows, limits.token_budget)

    def submit(self, submit: Submit) -> Answer:
        """Submits; the answer may be complete at once."""
        request = self.core.submit(submit)
        answer = Answer(request, unpack_int32(submit.output_token_ids), request.finish)
        self.answers[request.request_id] = answer
        self.drain_prompts()
        self.core.check_invariants()
        return answer

    def answer_asks(self, problem: str = "") -> list[Request]:
        """The worker answers what it was asked to compile; returns those who waited."""
        self.asks += self.core.grammar_asks()
        answered = []
        for ask in self.asks:
            answered += self.core.grammar_compiled(GrammarCompiled(ask.request_id, ask.attempt, problem))
            self.core.check_invariants()
        self.asks = []
        for request in answered:
            if not request.is_alive:
                self.answers[request.request_id].finish = request.finish
        self.drain_prompts()
        return answered

    def plan(self) -> bool:
        """Plans as far ahead as the core wants; whether a plan went out."""
        num_before = self.worker.next_step
        while self.core.can_plan():
            plan = self.core.plan_step()
            self.core.check_invariants()
            if plan is not None:
                self.worker.run(plan)
        return self.worker.next_step > num_before

    def deliver(self) -> list[Produced]:
        """Gives the core the oldest result."""
        produced = self.core.apply_result(self.worker.deliver())
        for item in produced:
            self.record(item)
        self.drain_prompts()
        self.core.check_invariants()
        return produced

    def drain_prompts(self) -> None:
        """Writes down what a tokenizer would be told of prompts."""
        for request, part in self.core.prompt_parts.drain():
            assert (part.request_id, part.attempt) == (request.request_id, request.attempt)
            self.prompt_parts.setdefault(request.request_id, []).append(part)

    def record(self, item: Produced | None) -> None:
        """Writes down what a client would get; nothing may be lost, repeated, or come after the end."""
        assert item is not None
        answer = self.answers[item.request.request_id]
        assert answer.finish is Finish.NONE
        assert item.first_index == len(answer.token_ids)
        answer.token_ids += item.token_ids
        answer.finish = item.finish
        assert answer.token_ids == unpack_int32(answer.request.output_bytes(0))

    def abort(self, answer: Answer) -> None:
        """The client goes away."""
        item = self.core.end(answer.request, Finish.ABORTED)
        if item is not None:
            self.record(item)
        self.drain_prompts()
        self.core.check_invariants()

    def stop_found(self, answer: Answer, end_index: int) -> bool:
        """The detokenizer found a stop string."""
        is_end = self.core.stop_found(answer.request, end_index)
        if is_end:
            answer.finish = answer.request.finish
            del answer.token_ids[end_index:]
            assert answer.token_ids == unpack_int32(answer.request.output_bytes(0))
        self.core.check_invariants()
        return is_end

    def run(self, max_steps: int = 100_000) -> int:
        """Plans and delivers until nothing is open; returns the number of steps that computed something."""
        num_before = len(self.worker.step_tokens)
        for _ in range(max_steps):
            self.answer_asks()
            self.plan()
            if not self.worker.results:
                break
            self.deliver()
        assert self.core.is_idle
        self.check_idle()
        return len(self.worker.step_tokens) - num_before

    def check_idle(self) -> None:
        """Every page is free or cached, and the worker keeps no row."""
        assert not self.worker.rows
        ledger = self.core.ledger
        assert ledger.cache.num_locked_pages == 0
        assert ledger.pool.num_free + ledger.cache.num_pages == self.limits.num_pages

    def check_answer(self, answer: Answer) -> None:
        """The whole answer of a request that ended by itself equals its solo run; any other is the start of it."""
        expected, finish = solo_output(answer.request.submit, self.limits.max_total_tokens)
        if answer.finish in (Finish.STOP_TOKEN, Finish.LENGTH):
            assert (answer.token_ids, answer.finish) == (expected, finish)
        else:
            assert answer.finish is not Finish.NONE
            assert answer.token_ids == expected[: len(answer.token_ids)]
        self.check_logprobs(answer)
        self.check_prompt(answer)

    def check_prompt(self, answer: Answer) -> None:
        """What was told of a prompt is the start of what its solo run tells, and all of it if the answer is whole."""
        told = self.prompt_parts.get(answer.request.request_id, [])
        entries: list[tuple[int, list[tuple[int, float]]]] = []
        embedding: list[float] = []
        for part in told:
            if isinstance(part, Embedding):
                embedding += unpack_float32(part.values)
                continue
            pairs = iter(zip(unpack_int32(part.token_ids), unpack_float32(part.logprobs), strict=True))
            by_position = [[next(pairs) for _ in range(count)] for count in unpack_int32(part.counts)]
            entries += list(enumerate(by_position, part.first_position))
        submit, is_whole = answer.request.submit, answer.finish in (Finish.STOP_TOKEN, Finish.LENGTH)
        expected, expected_embedding = prompt_entries(submit), solo_embedding(submit)
        assert entries == (expected if is_whole or answer.token_ids else expected[: len(entries)])
        assert embedding in ([expected_embedding] if is_whole else [[], expected_embedding])
        record = answer.request.prompt
        assert told == ([] if record is None else record.parts)

    def check_logprobs(self, answer: Answer) -> None:
        """What would be sent again of an answer's log-probabilities, from any index on, is what its solo run has."""
        request, num_before = answer.request, len(answer.request.submit.output_token_ids) // 4
        if request.logprobs is None:
            assert request.submit.sampling.num_logprobs < 0
            return
        expected = solo_logprobs(request.submit, answer.token_ids)
        expected[:num_before] = [[]] * min(num_before, len(expected))  # known to the tokenizer already
        for first_index in (0, len(expected) // 2):
            run = request.logprobs.between(first_index, len(expected))
            ids, values = unpack_int32(run.ids), unpack_float32(run.values)
            entries = iter(zip(ids, values, strict=True))
            assert [[next(entries) for _ in range(count)] for count in run.counts] == expected[first_index:]
            assert next(entries, None) is None
