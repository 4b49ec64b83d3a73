"""scheduler: which worker makes which answer, and the record of every request.

It asks `routing` for the order in which workers are asked, and gives a request to the first that takes it. A record
holds the prompt ids, the parameters and the output ids (in its `Request`), and where the answer goes. It stays after
the end until the tokenizer process has acknowledged the last id, so that a gap can be sent again; at the longest
RECORD_KEPT_S. Pure: the shell brings the clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container
from dataclasses import dataclass

from services.scheduler.admission import RequestRefusedError
from services.scheduler.backlog import Backlog, Errand
from services.scheduler.core import Core
from services.scheduler.outcomes import Produced
from services.scheduler.radix_cache import TOKEN_BYTES
from services.scheduler.request import Request, RequestState
from services.scheduler.routing import Offer, Routing, by_prefix
from services.wire.finish import Finish
from services.wire.requests import Submit

RECORD_KEPT_S = 60.0
_NOT_BEGUN = frozenset({RequestState.COMPILING, RequestState.HELD, RequestState.WAITING})
MAX_ENDED_RECORDS = 4096  # beyond it the oldest go first: their tokenizer has long stopped acknowledging


@dataclass(slots=True, eq=False)
class Record:
    """One request: its ids and parameters, the worker that runs it, and the processes that its answer goes through.

    Until it `is_admitted` its tokenizer may still be told that it is refused, and no detokenizer has heard of it.
    Times are monotonic: when it came, had its grammar compiled, was first planned, and gave its first token; 0.0 when
    that has not happened.
    """

    request: Request
    worker: bytes
    errand: Errand
    tokenizer: bytes
    detokenizer: bytes
    is_admitted: bool = False
    received_s: float = 0.0
    compiled_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0


class Router:
    """The cores (one for each worker, by routing id) and the records of all requests.

    Args:
        routing: which of several workers gets a request.
    """

    def __init__(self, routing: Routing = by_prefix) -> None:
        self.cores: dict[bytes, Core] = {}
        self.backlogs: dict[bytes, Backlog] = {}
        self.num_stale = 0  # messages about unknown requests or other attempts
        self.num_moved = 0  # requests that another worker took over before theirs began them
        self._routing = routing
        self._records: dict[bytes, Record] = {}
        self._ended: OrderedDict[bytes, float] = OrderedDict()
        self._num_open_of: Counter[bytes] = Counter()  # by detokenizer

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._records) - len(self._ended)

    @property
    def num_records(self) -> int:
        """Requests that are known, ended ones that nobody acknowledged included."""
        return len(self._records)

    def num_open_of(self, detokenizer: bytes) -> int:
        """Open answers that a detokenizer works on."""
        return self._num_open_of[detokenizer]

    def find(self, request_id: bytes, attempt: int) -> Record | None:
        """The record of exactly this attempt; a stale message is counted."""
        record = self._records.get(request_id)
        if record is None or record.request.attempt != attempt:
            self.num_stale += 1
            return None
        return record

    def newest_attempt(self, request_id: bytes) -> Record | None:
        """The record of a request, whichever its attempt."""
        return self._records.get(request_id)

    def add_worker(self, worker: bytes, core: Core, token_ms: float) -> None:
        """A worker joined: its core, and how long it computes a token of a prompt."""
        self.cores[worker] = core
        self.backlogs[worker] = Backlog(core.limits.page_size, token_ms)

    def submit(self, submit: Submit, workers: list[bytes], tokenizer: bytes, detokenizer: bytes) -> Record:
        """Gives a request to a worker; siblings with one prompt all to one.

        Args:
            submit: a request whose id has no record.
            workers: those that take new requests, at least one.
            tokenizer: whose client gets the answer.
            detokenizer: which makes it text.

        Raises:
            RequestRefusedError: it cannot run on any of them. When it only has to wait for one, that is what it says.
        """
        request, worker, errand = self._place(submit, workers, detokenizer)
        record = Record(request, worker, errand, tokenizer, detokenizer)
        self._records[submit.request_id] = record
        self._num_open_of[detokenizer] += 1
        return record

    def move_waiting(self, worker: bytes, takers: list[bytes]) -> None:
        """Gives to others what a worker that leaves has not begun. What nobody takes stays where it is.

        What somebody was told of stays too: parts of its prompt, or that its grammar can be used.
        """
        core = self.cores.get(worker)
        for request in core.open_requests if core is not None and takers else []:
            record = self._records.get(request.request_id)
            if core is None or record is None or not _can_move(record, request):
                continue
            try:
                placed = self._place(request.submit, takers, record.detokenizer)
            except RequestRefusedError:
                continue
            core.end(request, Finish.ABORTED)
            self.backlogs[worker].end(record.errand)
            record.request, record.worker, record.errand = placed
            self.num_moved += 1

    def prefilled(self, record: Record) -> None:
        """The first token of an answer came."""
        backlog = self.backlogs.get(record.worker)
        if backlog is not None:
            backlog.prefilled(record.errand)

    def settle(self, request: Request, now_s: float) -> Record | None:
        """The record of a request that produced something; notes its end. None when it was forgotten meanwhile."""
        record = self._records.get(request.request_id)
        if record is None or record.request is not request:
            return None
        if not request.is_alive and request.request_id not in self._ended:
            self._ended[request.request_id] = now_s
            self._close(record)
            if len(self._ended) > MAX_ENDED_RECORDS:
                oldest, _ = self._ended.popitem(last=False)
                del self._records[oldest]
        return record

    def end(self, record: Record, finish: Finish) -> Produced | None:
        """Ends a request; None when it had ended before. The caller settles what comes back."""
        core = self.cores.get(record.worker)
        return None if core is None else core.end(record.request, finish)

    def stop_found(self, record: Record, end_index: int) -> bool:
        """A stop string ends an answer at `end_index`. One that ended later already is cut: the lowest end wins.

        Returns:
            Whether the answer now ends there.
        """
        request = record.request
        if request.is_alive:
            core = self.cores.get(record.worker)
            return core is not None and core.stop_found(request, end_index)
        if not 0 < end_index <= request.num_output:
            return False
        request.truncate_output(end_index)
        request.finish = Finish.STOP_STRING
        return True

    @property
    def has_ended(self) -> bool:
        """Whether any record is of a request that has ended: only such ones can be forgotten."""
        return bool(self._ended)

    def may_be_forgotten(self, request_id: bytes) -> bool:
        """Whether an acknowledgement of this request changes anything: it has ended, or is not known."""
        return request_id in self._ended or request_id not in self._records

    def acknowledge(self, record: Record, next_index: int) -> None:
        """The tokenizer has all ids below `next_index`: an ended request that has no more is forgotten."""
        if not record.request.is_alive and next_index >= record.request.num_output:
            self.forget(record)

    def forget(self, record: Record) -> None:
        """Drops the record of a request that ended."""
        request_id = record.request.request_id
        if self._records.get(request_id) is record:
            del self._records[request_id]
            if self._ended.pop(request_id, None) is None:
                self._close(record)

    def expire(self, now_s: float) -> None:
        """Forgets what ended RECORD_KEPT_S ago and was never acknowledged."""
        while self._ended:
            request_id, ended_s = next(iter(self._ended.items()))
            if now_s - ended_s < RECORD_KEPT_S:
                return
            del self._ended[request_id], self._records[request_id]

    def is_awaited(self, tokenizers: Container[bytes]) -> bool:
        """Whether one of these tokenizers has not acknowledged an answer that ended."""
        return any(self._records[request_id].tokenizer in tokenizers for request_id in self._ended)

    def open_records(self) -> list[Record]:
        """Every record whose request has not ended."""
        return [record for record in self._records.values() if record.request.is_alive]

    def remove_worker(self, worker: bytes) -> list[Produced]:
        """A worker left: every request that it ran ends with BACKEND_LOST."""
        core = self.cores.pop(worker, None)
        self.backlogs.pop(worker, None)
        if core is None:
            return []
        ended = [core.end(request, Finish.BACKEND_LOST) for request in core.open_requests]
        return [item for item in ended if item is not None]

    def _place(self, submit: Submit, workers: list[bytes], detokenizer: bytes) -> tuple[Request, bytes, Errand]:
        refusal: RequestRefusedError | None = None
        for worker, num_prefix in self._order(submit, workers):
            try:
                request = self.cores[worker].submit(submit, detokenizer)
            except RequestRefusedError as error:
                if refusal is None or refusal.status != 503:
                    refusal = error
                continue
            return request, worker, self.backlogs[worker].give(submit.cache_root, submit.prompt_token_ids, num_prefix)
        raise refusal or ValueError("no worker to ask")

    def _order(self, submit: Submit, workers: list[bytes]) -> list[tuple[bytes, int]]:
        """The workers in the order in which they are asked, and how much of the prompt each holds or is to compute."""
        if len(workers) == 1:
            return [(workers[0], self._num_prefix(submit, workers[0]))]
        offers = []
        for worker in workers:
            backlog = self.backlogs[worker]
            num_prefix = self._num_prefix(submit, worker)
            offers.append(Offer(worker, num_prefix, backlog.load_ms, backlog.token_ms, backlog.num_given))
        order = self._routing(offers, len(submit.prompt_token_ids) // TOKEN_BYTES)
        leader = self._records.get(submit.group_id)
        if leader is not None and _are_siblings(leader.request, submit):
            order.sort(key=lambda offer: offer.worker != leader.worker)  # one prompt is computed once
        return [(offer.worker, offer.num_prefix) for offer in order]

    def _num_prefix(self, submit: Submit, worker: bytes) -> int:
        root, prompt = submit.cache_root, submit.prompt_token_ids
        core = self.cores[worker]
        if not core.limits.caches_prefixes:
            return 0
        return max(core.ledger.cache.peek(root, prompt), self.backlogs[worker].promised(root, prompt))

    def _close(self, record: Record) -> None:
        backlog = self.backlogs.get(record.worker)
        if backlog is not None:
            backlog.end(record.errand)
        self._num_open_of[record.detokenizer] -= 1
        if not self._num_open_of[record.detokenizer]:
            del self._num_open_of[record.detokenizer]


def _are_siblings(leader: Request, submit: Submit) -> bool:
    """Whether an open request and a new one of its group have the same prompt."""
    return leader.is_alive and leader.submit.prompt_token_ids == submit.prompt_token_ids


def _can_move(record: Record, request: Request) -> bool:
    """Whether a request can begin elsewhere as if it had just come."""
    is_told_of_prompt = request.prompt is not None and bool(request.prompt.parts)
    is_told_of_grammar = record.is_admitted and request.submit.sampling.grammar is not None
    is_same = record.request is request and request.state in _NOT_BEGUN
    return is_same and not is_told_of_prompt and not is_told_of_grammar
