"""Tokenizer process: every open request, what comes in for it, and what is due for the scheduler.

Owns the journal entries. Chunks of a batch are taken row by row and each client's sink is flushed once a batch. One
task touches it; it never waits, not even for a slow client: sinks merge what a client does not take.

It must never let one answer's fault touch another: a row that raises ends its own request with a 500.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from services.runtime.histogram import Histogram
from services.runtime.logs import about
from services.tokenizer.api_error import ApiError, finish_error, internal_error, refusal_error
from services.tokenizer.journal import ChunkRow, GapError, JournalEntry, chunk_rows
from services.tokenizer.open_request import AnswerSink, OpenRequest
from services.tokenizer.prompt_pieces import PieceGapError, PromptPieces
from services.wire.answers import TextChunks
from services.wire.columns import pack_int32, pack_request_ids
from services.wire.finish import Finish
from services.wire.requests import Abort, Acknowledge, Admitted, Refused, Resend, Submit
from services.wire.steps import Embedding, PromptLogprobs

RESEND_AGAIN_S = 1.0
MAX_RESENDS = 10
_LATENCY_BOUNDS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NO_FAULTS = frozenset({Finish.TIMEOUT, Finish.ABORTED, Finish.GRAMMAR_TOO_LARGE})  # wanted so, or the client's doing

logger = logging.getLogger(__name__)


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
        self.has_new_end = False
        """Whether an answer has ended since the last `take_acknowledgement`."""
        self.requests: dict[OpenRequest, None] = {}
        self._answers: dict[bytes, _OpenAnswer] = {}
        self._gapped: dict[bytes, _OpenAnswer] = {}
        self._unacknowledged: dict[JournalEntry, None] = {}
        self._gaps: dict[float, int] = {}  # of the batch that is being taken: time of the last token -> answers

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
        pieces = {entry.request_id: entry.pieces for entry in entries}
        for entry in entries:
            entry.pieces = pieces[entry.submit.group_id]
        request = OpenRequest(entries, sink, received_s)
        for choice, entry in enumerate(entries):
            self._answers[entry.request_id] = _OpenAnswer(entry, request, choice)
        self.requests[request] = None
        for prompt in dict.fromkeys(pieces.values()):
            if prompt is not None and prompt.are_complete:  # a prompt of one token: nothing of it is to come
                self._hand_on(request, prompt, received_s)
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
            answer.request.refuse(refusal_error(message))

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
                logger.exception("an answer breaks off: %s", error.message, extra=about(row.request_id))
                answer.request.fail(error)
            touched[answer.request.sink] = None
        self._observe_gaps(now_s)
        for sink in touched:
            sink.flush()

    def take_piece(self, message: PromptLogprobs | Embedding, now_s: float) -> None:
        """Takes what was asked of a prompt itself; a fault in it ends its own request."""
        try:
            self._take_piece(message, now_s)
        except Exception:
            error = internal_error()
            logger.exception("%s", error.message, extra=about(message.request_id))
            if message.request_id in self._answers:
                self._answers[message.request_id].request.fail(error)

    def take_acknowledgement(self) -> Acknowledge | None:
        """The cumulative acknowledgement of all that came since the last one."""
        if not self._unacknowledged:
            return None
        new, self._unacknowledged = self._unacknowledged, {}
        self.has_new_end = False
        entries: list[JournalEntry] = []
        for entry in new:
            if entry.misses_pieces:  # once all is acknowledged nobody could send these again
                self._unacknowledged[entry] = None
            else:
                entries.append(entry)
        if not entries:
            return None
        return Acknowledge(
            pack_request_ids(entry.request_id for entry in entries),
            pack_int32(entry.attempt for entry in entries),
            pack_int32(entry.next_index for entry in entries),
        )

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
                logger.error("an answer stays incomplete: %s", error.message, extra=about(answer.entry.request_id))
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
            self._end(answer, now_s)

    def _end(self, answer: _OpenAnswer, now_s: float) -> None:
        self.has_new_end = True
        entry, request = answer.entry, answer.request
        error = finish_error(entry.finish)
        if error is None and entry.misses_pieces:
            self._await_pieces(entry, now_s)
        elif error is None:
            if not entry.next_index:
                self._unacknowledged[entry] = None  # no id says that this answer has arrived
            request.sink.end(answer.choice, entry.ending)
        else:
            level = logging.INFO if entry.finish in _NO_FAULTS else logging.ERROR
            whom = about(entry.request_id)
            logger.log(level, "an answer ended with %s: %s", entry.finish.name, error.message, extra=whom)
            request.fail(error)

    def _await_pieces(self, entry: JournalEntry, now_s: float) -> None:
        """They travel by another way and may be behind the end of the answer: time enough before they are asked for."""
        if entry.pieces is not None:
            source = self._answers[entry.pieces.request_id]
            source.asked_s = now_s
            self._gapped[entry.pieces.request_id] = source

    def _take_piece(self, message: PromptLogprobs | Embedding, now_s: float) -> None:
        answer = self._answers.get(message.request_id)
        if answer is None or answer.entry.attempt != message.attempt or answer.entry.pieces is None:
            self.counters.late_rows += 1
            return
        pieces = answer.entry.pieces
        try:
            if isinstance(message, Embedding):
                is_new = pieces.take_embedding(message)
            else:
                is_new = pieces.take_logprobs(message)
        except PieceGapError:
            self.counters.gaps += 1
            self._gapped[message.request_id] = answer
            return
        if not is_new:
            self.counters.old_rows += 1
        elif pieces.are_complete:
            self._gapped.pop(message.request_id, None)
            self._hand_on(answer.request, pieces, now_s)

    def _hand_on(self, request: OpenRequest, pieces: PromptPieces, now_s: float) -> None:
        """The pieces of a prompt are complete: its answers get them, and those that waited for them end."""
        for choice, entry in enumerate(request.entries):
            if entry.pieces is pieces:
                if pieces.wants_logprobs:
                    request.sink.set_prompt(choice, pieces.logprobs)
                if entry.finish is not Finish.NONE:
                    self._end(self._answers[entry.request_id], now_s)
        request.sink.flush()

    def _count_tokens(self, answer: _OpenAnswer, num_tokens: int, now_s: float) -> None:
        entry = answer.entry
        self.counters.generation_tokens += num_tokens
        last_s = entry.last_token_s
        if last_s:
            self._gaps[last_s] = self._gaps.get(last_s, 0) + 1
            answer.request.gaps_s.append(now_s - last_s)
        else:
            self.first_token_s.observe(now_s - answer.request.received_s)
            entry.first_token_s = now_s
        entry.last_token_s = self.last_token_s = now_s
        self._unacknowledged[entry] = None
        if self._gapped:
            self._gapped.pop(entry.request_id, None)

    def _observe_gaps(self, now_s: float) -> None:
        """Most answers of a batch had their last token at the same time: one observation for all of these."""
        for last_s, num_answers in self._gaps.items():
            self.inter_token_s.observe(now_s - last_s, num_answers)
        self._gaps.clear()
