"""scheduler: what tokenizers and detokenizers are told about requests, and what they ask for.

It owns the deadlines and the rows of `TokensProduced` that wait for the end of the turn. It decides nothing about what
runs (the cores do) and nothing about text. Who cannot be reached is put into `unreachable`; the shell removes it.
"""

from __future__ import annotations

import logging
import secrets

from services.runtime.logs import about
from services.scheduler.admission import RequestRefusedError
from services.scheduler.deadlines import Deadlines
from services.scheduler.journeys import Journeys
from services.scheduler.load_report import RETRY_STARTING_S, FinishRate
from services.scheduler.outcomes import Produced, StepOutcome, TokenRun
from services.scheduler.prompt_record import PromptPart
from services.scheduler.refusals import grammar_overdue, invalid_grammar, refusal_of_end, refused
from services.scheduler.request import Request, RequestState
from services.scheduler.router import Record, Router
from services.scheduler.token_batch import TokenBatch
from services.wire.answers import DecodeFailed, DecodeOpen, StopFound, TextChunks
from services.wire.columns import pack_int32, unpack_int32, unpack_request_ids
from services.wire.finish import Finish
from services.wire.joined_rows import joined_rows
from services.wire.requests import Abort, Acknowledge, Admitted, Resend, Submit
from services.wire.steps import GrammarCompiled
from services.wire.transport import RouterPort

# For the worker's word about a grammar. It ends a compilation itself after a few seconds, but on a busy machine the
# child that compiles took ten to start.
GRAMMAR_LIMIT_S = 30.0

logger = logging.getLogger(__name__)


class Answers:
    """The way of every answer between the cores and the other processes."""

    def __init__(self, router: Router, port: RouterPort, journeys: Journeys) -> None:
        self.router = router
        self.journeys = journeys
        self.rate = FinishRate()
        self.num_refused = 0
        self.last_token_s: float | None = None
        self.unreachable: set[bytes] = set()
        self._port = port
        self._deadlines = Deadlines()
        self._compile_deadlines = Deadlines()
        self._batches: dict[bytes, TokenBatch] = {}
        self._runs: dict[bytes, list[TokenRun]] = {}  # by detokenizer; those of a batch are in the batch

    @property
    def next_deadline_s(self) -> float:
        """When `end_overdue` has something to do; infinity when never."""
        return min(self._deadlines.next_s(), self._compile_deadlines.next_s())

    # ------------------------------------------------------------ from tokenizers

    def submit(self, tokenizer: bytes, submit: Submit, places: tuple[list[bytes], list[bytes]], now_s: float) -> None:
        """Takes a request and answers it with Admitted or Refused.

        Args:
            tokenizer: who sent it.
            submit: the request. One that is known under this attempt is answered again, an older attempt is dropped, a
                newer one takes the place of what ran before.
            places: the workers and the detokenizers that take new requests.
            now_s: the time.
        """
        known = self.router.newest_attempt(submit.request_id)
        if known is not None and known.request.attempt > submit.attempt:
            self.router.num_stale += 1
            return
        if known is not None and known.request.attempt == submit.attempt:
            if known.is_admitted:
                self._send(tokenizer, Admitted(submit.request_id, submit.attempt))
            return
        if known is not None:
            self._drop(known, now_s)
        workers, detokenizers = places
        try:
            if not workers or not detokenizers:
                raise RequestRefusedError(503, "starting", "The server is starting.")
            detokenizer = min(detokenizers, key=self.router.num_open_of)
            record = self.router.submit(submit, workers, tokenizer, detokenizer)
        except RequestRefusedError as refusal:
            self.refuse(tokenizer, submit, refusal, self._retry_after_s(refusal, now_s))
            return
        except Exception:  # a fault of ours in one request must not end the others
            error_id = secrets.token_hex(4)
            logger.exception("error %s: a request was not taken", error_id, extra=about(submit.request_id))
            fault = RequestRefusedError(500, "internal_error", f"The server failed (error {error_id}).")
            self.refuse(tokenizer, submit, fault, 0)
            return
        record.received_s = now_s
        if submit.deadline_ms:
            self._deadlines.add(now_s + submit.deadline_ms / 1000, submit.request_id, submit.attempt)
        if record.request.state is RequestState.COMPILING:
            self._compile_deadlines.add(now_s + GRAMMAR_LIMIT_S, submit.request_id, submit.attempt)
        else:
            self._admit(record, now_s)

    def refuse(self, tokenizer: bytes, submit: Submit, refusal: RequestRefusedError, retry_after_s: int) -> None:
        """Answers a request that is not taken."""
        self.num_refused += 1
        self._send(tokenizer, refused(submit, refusal, retry_after_s))

    def abort(self, message: Abort, now_s: float) -> None:
        """Nobody reads these answers any more."""
        for record in self._records(message.request_ids, message.attempts):
            self._drop(record, now_s)

    def acknowledge(self, message: Acknowledge) -> None:
        """Tokenizers have written down what came so far."""
        if not self.router.has_ended:  # nearly always: those that go on are kept
            return
        request_ids = unpack_request_ids(message.request_ids)
        places = [place for place, name in enumerate(request_ids) if self.router.may_be_forgotten(name)]
        attempts, indexes = unpack_int32(message.attempts), unpack_int32(message.next_indexes)
        for place in places:
            record = self.router.find(request_ids[place], attempts[place])
            if record is not None:
                self.router.acknowledge(record, indexes[place])

    def tokenizer_lost(self, tokenizer: bytes, now_s: float) -> None:
        """Its clients are gone: their requests end. The records stay for a while, should somebody come for them."""
        for record in self.router.open_records():
            if record.tokenizer == tokenizer:
                self.end(record, Finish.ABORTED, now_s)

    # ------------------------------------------------------------ from detokenizers

    def stop_found(self, message: StopFound, now_s: float) -> None:
        """Stop strings end answers; the detokenizer knows, so nothing is sent."""
        attempts, indexes = unpack_int32(message.attempts), unpack_int32(message.end_indexes)
        for request_id, attempt, index in zip(unpack_request_ids(message.request_ids), attempts, indexes, strict=True):
            record = self.router.find(request_id, attempt)
            if record is not None:
                was_alive = record.request.is_alive
                if self.router.stop_found(record, index) and was_alive:
                    self._settle(record, now_s)

    def decode_failed(self, message: DecodeFailed, now_s: float) -> None:
        """A detokenizer gave these up and told their clients."""
        for record in self._records(message.request_ids, message.attempts):
            if self.router.end(record, Finish.INTERNAL_ERROR) is not None:
                self._settle(record, now_s)
            self.router.forget(record)

    def detokenizer_lost(self, detokenizer: bytes, now_s: float) -> None:
        """The answers that it worked on end; their tokenizers are told directly, since nobody else can."""
        self._batches.pop(detokenizer, None)
        self._runs.pop(detokenizer, None)
        for record in self.router.open_records():
            if record.detokenizer == detokenizer:
                self.router.end(record, Finish.BACKEND_LOST)
                if not record.is_admitted:
                    self._refuse_record(record, refusal_of_end(Finish.BACKEND_LOST), now_s)
                    continue
                self._settle(record, now_s)
                self._send(record.tokenizer, _bare_end(record, Finish.BACKEND_LOST))

    def resend(self, message: Resend, from_tokenizer: bool) -> None:
        """Sends tokens again. For a tokenizer the whole answer goes to a fresh decoder."""
        attempts, indexes = unpack_int32(message.attempts), unpack_int32(message.first_indexes)
        for request_id, attempt, index in zip(unpack_request_ids(message.request_ids), attempts, indexes, strict=True):
            record = self.router.find(request_id, attempt)
            if record is None or not record.is_admitted:
                continue
            if from_tokenizer and record.request.prompt is not None:
                self._tell_prompt([(record.request, part) for part in record.request.prompt.parts])
            first_index = 0 if from_tokenizer else index
            if first_index == 0:
                self.flush()  # what was produced before goes out before the decoder is made anew
                self._open(record)
            self._replay(record, first_index)

    # ------------------------------------------------------------ from workers and cores

    def grammar_compiled(self, worker: bytes, message: GrammarCompiled, now_s: float) -> None:
        """A grammar can be used: who waited for it is admitted. Or it cannot: they are refused."""
        core = self.router.cores.get(worker)
        for request in [] if core is None else core.grammar_compiled(message):
            record = self.router.newest_attempt(request.request_id)
            if record is None or record.request is not request:
                continue
            if message.problem:
                self._refuse_record(record, invalid_grammar(message.problem), now_s)
            else:
                record.compiled_s = now_s
                self._admit(record, now_s)

    def take(self, outcome: StepOutcome, now_s: float) -> None:
        """What a step brought. Of a run nothing needs to be looked at: its requests go on, and had tokens before."""
        for run in outcome.runs:
            if run.lane in self._batches:
                self._batches[run.lane].add_run(run)
            else:
                self._runs.setdefault(run.lane, []).append(run)
            self.last_token_s = now_s
        self.produced(outcome.rows, now_s)

    def produced(self, items: list[Produced], now_s: float) -> None:
        """New tokens and ends, as a core gave them."""
        if not items:
            return
        for item in items:
            request = item.request
            record = self.router.settle(request, now_s)
            if record is None:
                continue
            if not record.first_token_s and item.token_ids:
                self.router.prefilled(record)
                self.journeys.first_token(record, now_s)
            if item.finish and not record.is_admitted:
                self._refuse_record(record, refusal_of_end(item.finish), now_s)
                continue
            if item.finish:
                self._count_end(record, now_s)
            self._batch(record.detokenizer).add(request, item.first_index, item.token_ids, item.finish)
        if any(item.token_ids for item in items):
            self.last_token_s = now_s

    def tell_prompts(self) -> None:
        """What the cores learned of prompts goes straight to the tokenizers."""
        for core in self.router.cores.values():
            self._tell_prompt(core.prompt_parts.drain())

    def end(self, record: Record, finish: Finish, now_s: float) -> None:
        """Ends a request from outside its core; its detokenizer is told."""
        item = self.router.end(record, finish)
        if item is not None and record.is_admitted:
            self._batch(record.detokenizer).add(item.request, item.first_index, [], finish)
            self._settle(record, now_s)
        elif item is not None:
            self._refuse_record(record, refusal_of_end(finish), now_s)

    def end_overdue(self, now_s: float) -> None:
        """Ends requests whose deadline is over, and refuses those whose grammar nobody has compiled in time."""
        for request_id, attempt in self._deadlines.pop_due(now_s):
            record = self.router.newest_attempt(request_id)
            if record is not None and record.request.attempt == attempt:
                self.end(record, Finish.TIMEOUT, now_s)
        for request_id, attempt in self._compile_deadlines.pop_due(now_s):
            record = self.router.newest_attempt(request_id)
            if record is not None and (record.request.attempt, record.is_admitted) == (attempt, False):
                self.router.end(record, Finish.ABORTED)
                self._refuse_record(record, grammar_overdue(GRAMMAR_LIMIT_S), now_s)

    def flush(self) -> None:
        """Sends what was produced since the last time: one message to each detokenizer."""
        runs, self._runs = self._runs, {}
        for detokenizer, of_one in runs.items():
            self._send(detokenizer, joined_rows([run.message() for run in of_one]))
        batches, self._batches = self._batches, {}
        for detokenizer, batch in batches.items():
            for message in batch.messages():
                self._send(detokenizer, message)

    # ------------------------------------------------------------ inside

    def _batch(self, detokenizer: bytes) -> TokenBatch:
        batch = self._batches.get(detokenizer)
        if batch is None:
            batch = self._batches[detokenizer] = TokenBatch()
            for run in self._runs.pop(detokenizer, ()):
                batch.add_run(run)
        return batch

    def _admit(self, record: Record, now_s: float) -> None:
        record.is_admitted = True
        self._open(record)
        self._send(record.tokenizer, Admitted(record.request.request_id, record.request.attempt))
        if not record.request.is_alive:  # it had ended in an earlier attempt
            self._replay(record, 0)
            self.router.settle(record.request, now_s)

    def _drop(self, record: Record, now_s: float) -> None:
        """Ends and forgets a request of which its tokenizer wants to hear no more."""
        if record.is_admitted:
            self.end(record, Finish.ABORTED, now_s)
        else:
            self.router.end(record, Finish.ABORTED)
        self.router.forget(record)

    def _refuse_record(self, record: Record, refusal: RequestRefusedError, now_s: float) -> None:
        """Refuses a request that has a record, was not admitted, and has ended."""
        self.refuse(record.tokenizer, record.request.submit, refusal, self._retry_after_s(refusal, now_s))
        self.router.forget(record)

    def _open(self, record: Record) -> None:
        submit = record.request.submit
        self._send(record.detokenizer, DecodeOpen(submit.request_id, submit.attempt, record.tokenizer, submit.text))

    def _replay(self, record: Record, first_index: int) -> None:
        request = record.request
        if first_index <= request.num_output:
            token_ids = unpack_int32(request.output_bytes(first_index))
            self._batch(record.detokenizer).add(request, first_index, token_ids, request.finish)

    def _tell_prompt(self, parts: list[tuple[Request, PromptPart]]) -> None:
        for request, part in parts:
            record = self.router.newest_attempt(request.request_id)
            if record is not None and record.request is request:
                self._send(record.tokenizer, part)

    def _settle(self, record: Record, now_s: float) -> None:
        self.router.settle(record.request, now_s)
        self._count_end(record, now_s)

    def _count_end(self, record: Record, now_s: float) -> None:
        self.rate.count(now_s)
        self.journeys.ended(record, now_s)

    def _records(self, request_ids: bytes, attempts: bytes) -> list[Record]:
        pairs = zip(unpack_request_ids(request_ids), unpack_int32(attempts), strict=True)
        found = [self.router.find(request_id, attempt) for request_id, attempt in pairs]
        return [record for record in found if record is not None]

    def _retry_after_s(self, refusal: RequestRefusedError, now_s: float) -> int:
        if refusal.status != 503:
            return 0
        if refusal.code == "starting":
            return RETRY_STARTING_S
        return self.rate.retry_after_s(sum(core.num_waiting for core in self.router.cores.values()), now_s)

    def _send(self, peer: bytes, message: object) -> None:
        if not self._port.send(peer, message):
            self.unreachable.add(peer)


def _bare_end(record: Record, finish: Finish) -> TextChunks:
    """The end of an answer without ids and text, as a detokenizer would send it."""
    request = record.request
    return TextChunks(
        request_ids=request.request_id,
        attempts=pack_int32([request.attempt]),
        first_indexes=pack_int32([request.num_output]),
        counts=pack_int32([0]),
        token_ids=b"",
        text_offsets=pack_int32([0]),
        texts=("",),
        finishes=bytes([finish]),
        completion_tokens=pack_int32([request.num_output]),
        cached_tokens=pack_int32([max(request.cached_tokens, 0)]),
    )
