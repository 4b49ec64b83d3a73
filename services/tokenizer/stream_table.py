"""Tokenizer process: every open request, what comes in for it, and what is due for the scheduler.

Owns the journal entries. Chunks of a batch are taken row by row and each client's sink is flushed once a batch. One
task touches it; it never waits, not even for a slow client: sinks merge what a client does not take.

It must never let one answer's fault touch another: a row that raises ends its own request with a 500.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.runtime.histogram import Histogram
from services.tokenizer.answer_parts import TokenLogprobs
from services.tokenizer.api_error import ApiError, finish_error, internal_error, refusal_error
from services.tokenizer.journal import AnswerNews, ChunkRow, Ending, GapError, JournalEntry, chunk_rows
from services.wire.columns import pack_int32, pack_request_ids
from services.wire.messages import (
    Abort,
    Acknowledge,
    Admitted,
    Finish,
    HopReport,
    Refused,
    Resend,
    Role,
    Submit,
    TextChunks,
)

RESEND_AGAIN_S = 1.0
MAX_RESENDS = 10
_LATENCY_BOUNDS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

logger = logging.getLogger(__name__)


class AnswerSink(Protocol):
    """Where the answers of a request go. Every call returns at once."""

    def add(self, choice: int, news: AnswerNews) -> None:
        """More of one answer."""

    def set_prompt(self, choice: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """The log-probabilities of an answer's prompt, one for each of its tokens."""

    def end(self, choice: int, ending: Ending) -> None:
        """One answer is complete: STOP_TOKEN, STOP_STRING or LENGTH."""

    def fail(self, error: ApiError) -> None:
        """The request cannot be completed; may come more than once, the first counts."""

    def flush(self) -> None:
        """The batch is over: hand on what came."""

    def keep_alive(self, now_s: float) -> None:
        """Called about once a second: a chance to say that the server is still there."""


@dataclass
class TableCounters:
    """Totals since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    aborted_answers: int = 0
    old_rows: int = 0
    late_rows: int = 0
    gaps: int = 0
    refused_messages: int = 0


class OpenRequest:
    """One HTTP request (or probe) and its answers."""

    __slots__ = ("admission", "admitted_s", "entries", "received_s", "reports", "sink", "submitted_s", "unadmitted")

    def __init__(self, entries: list[JournalEntry], sink: AnswerSink, received_s: float) -> None:
        self.entries = entries
        self.sink = sink
        self.received_s = received_s
        self.submitted_s = time.monotonic()
        self.admitted_s = 0.0
        """When the last answer was admitted; 0 before."""
        self.reports: dict[Role, HopReport] = {}
        """What other processes told of its answers so far; the last word of each kind of process."""
        self.unadmitted = {entry.request_id for entry in entries}
        self.admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when every answer was admitted; an ApiError when one was refused or the request failed before that."""

    def admit(self, request_id: bytes) -> None:
        """One answer was taken by the scheduler."""
        self.unadmitted.discard(request_id)
        if not self.unadmitted and not self.admission.done():
            self.admitted_s = time.monotonic()
            self.admission.set_result(None)

    def fail(self, error: ApiError) -> None:
        """Ends the request; its owner closes it."""
        if not self.admission.done():
            self.admission.set_exception(error)
            self.admission.exception()  # whoever waits gets it; nobody may be waiting any more
        self.sink.fail(error)


class _OpenAnswer:
    __slots__ = ("asked_s", "choice", "entry", "num_asks", "request")

    def __init__(self, entry: JournalEntry, request: OpenRequest, choice: int) -> None:
        self.entry = entry
        self.request = request
        self.choice = choice
        self.asked_s = 0.0
        self.num_asks = 0


class StreamTable:
    """The open requests by the ids of their answers. Times are those of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.counters = TableCounters()
        self.first_token_s = Histogram(_LATENCY_BOUNDS_S)
        self.inter_token_s = Histogram(_LATENCY_BOUNDS_S)
        self.last_token_s = float("-inf")
        """When a token last came in for anybody."""
        self.requests: dict[OpenRequest, None] = {}
        self._answers: dict[bytes, _OpenAnswer] = {}
        self._gapped: dict[bytes, _OpenAnswer] = {}
        self._unacknowledged: dict[bytes, JournalEntry] = {}

    @property
    def num_answers(self) -> int:
        """Answers asked for and not closed."""
        return len(self._answers)

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether ids came since the last `take_acknowledgement`."""
        return bool(self._unacknowledged)

    @property
    def has_gaps(self) -> bool:
        """Whether something must be asked for again."""
        return bool(self._gapped)

    def open(self, submits: Sequence[Submit], sink: AnswerSink, received_s: float) -> OpenRequest:
        """Journals a request; the caller sends the submits, and calls `close` whatever happens."""
        entries = [JournalEntry(submit) for submit in submits]
        request = OpenRequest(entries, sink, received_s)
        for choice, entry in enumerate(entries):
            self._answers[entry.request_id] = _OpenAnswer(entry, request, choice)
        self.requests[request] = None
        return request

    def close(self, request: OpenRequest) -> Abort | None:
        """Forgets a request; the Abort for the answers that have not ended."""
        if request not in self.requests:
            return None
        del self.requests[request]
        for entry in request.entries:
            del self._answers[entry.request_id]
            self._gapped.pop(entry.request_id, None)
        open_entries = [entry for entry in request.entries if entry.finish is Finish.NONE]
        if not open_entries:
            return None
        self.counters.aborted_answers += len(open_entries)
        return Abort(
            pack_request_ids(entry.request_id for entry in open_entries),
            pack_int32(entry.attempt for entry in open_entries),
        )

    def admit(self, message: Admitted) -> None:
        """An answer was taken; late ones are nobody's any more."""
        answer = self._answers.get(message.request_id)
        if answer is not None and answer.entry.attempt == message.attempt:
            if answer.entry.submit.sampling.choice == 0:
                self.counters.prompt_tokens += answer.entry.num_prompt_tokens
            answer.request.admit(message.request_id)

    def refuse(self, message: Refused) -> None:
        """An answer was not taken: its request fails as a whole."""
        answer = self._answers.get(message.request_id)
        if answer is not None and answer.entry.attempt == message.attempt:
            answer.entry.finish = Finish.ABORTED  # the scheduler does not hold it: nothing to abort
            answer.request.fail(refusal_error(message))

    def fail_all(self, error: ApiError) -> None:
        """Ends every open request."""
        for request in list(self.requests):
            request.fail(error)

    def take(self, chunks: TextChunks, now_s: float) -> None:
        """Takes a batch and flushes the sinks that got something."""
        touched: dict[AnswerSink, None] = {}
        for row in chunk_rows(chunks):
            answer = self._answers.get(row.request_id)
            if answer is None:
                self.counters.late_rows += 1
                continue
            try:
                self._take_row(answer, row, now_s)
            except GapError:
                self.counters.gaps += 1
                self._gapped[row.request_id] = answer
                continue
            except Exception:
                error = internal_error()
                logger.exception("answer %s: %s", row.request_id.hex(), error.message)
                answer.request.fail(error)
            touched[answer.request.sink] = None
        for sink in touched:
            sink.flush()

    def take_acknowledgement(self) -> Acknowledge | None:
        """The cumulative acknowledgement of all that came since the last one."""
        if not self._unacknowledged:
            return None
        entries = self._unacknowledged.values()
        message = Acknowledge(
            pack_request_ids(self._unacknowledged),
            pack_int32(entry.attempt for entry in entries),
            pack_int32(entry.next_index for entry in entries),
        )
        self._unacknowledged = {}
        return message

    def take_resend(self, now_s: float) -> Resend | None:
        """The request for what is missing; each answer is asked for at most once in RESEND_AGAIN_S.

        A fresh decoder replays such an answer from index 0. One that stays broken fails.
        """
        due = [answer for answer in self._gapped.values() if answer.asked_s <= now_s - RESEND_AGAIN_S]
        for answer in due:
            answer.asked_s = now_s
            answer.num_asks += 1
            if answer.num_asks > MAX_RESENDS:
                error = internal_error()
                logger.error("answer %s stays incomplete: %s", answer.entry.request_id.hex(), error.message)
                answer.request.fail(error)
        if not due:
            return None
        return Resend(
            pack_request_ids(answer.entry.request_id for answer in due),
            pack_int32(answer.entry.attempt for answer in due),
            pack_int32(0 for _ in due),
        )

    def _take_row(self, answer: _OpenAnswer, row: ChunkRow, now_s: float) -> None:
        entry, request = answer.entry, answer.request
        first_new_index = entry.next_index
        news = entry.take(row)
        if news is None:
            self.counters.old_rows += 1
            return
        if entry.next_index != first_new_index:
            self._count_tokens(answer, entry.next_index - first_new_index, now_s)
        request.sink.add(answer.choice, news)
        if entry.finish is not Finish.NONE:
            self._end(answer)

    def _end(self, answer: _OpenAnswer) -> None:
        entry, request = answer.entry, answer.request
        error = finish_error(entry.finish)
        if error is None:
            request.sink.end(answer.choice, entry.ending)
        else:
            logger.error("answer %s ended with %s: %s", entry.request_id.hex(), entry.finish.name, error.message)
            request.fail(error)

    def _count_tokens(self, answer: _OpenAnswer, num_tokens: int, now_s: float) -> None:
        entry = answer.entry
        self.counters.generation_tokens += num_tokens
        if entry.last_token_s:
            self.inter_token_s.observe(now_s - entry.last_token_s)
        else:
            self.first_token_s.observe(now_s - answer.request.received_s)
            entry.first_token_s = now_s
        entry.last_token_s = self.last_token_s = now_s
        self._unacknowledged[entry.request_id] = entry
        if self._gapped:
            self._gapped.pop(entry.request_id, None)
