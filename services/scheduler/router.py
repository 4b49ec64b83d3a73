"""scheduler: which worker makes which answer, and the record of every request.

A record holds the prompt ids, the parameters and the output ids (in its `Request`), and where the answer goes. It stays
after the end until the tokenizer process has acknowledged the last id, so that a gap can be sent again; at the longest
RECORD_KEPT_S. Pure: the shell brings the clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container
from dataclasses import dataclass

from services.scheduler.core import Core
from services.scheduler.outcomes import Produced
from services.scheduler.request import Request
from services.wire.finish import Finish
from services.wire.requests import Submit

RECORD_KEPT_S = 60.0
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
    tokenizer: bytes
    detokenizer: bytes
    is_admitted: bool = False
    received_s: float = 0.0
    compiled_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0


class Router:
    """The cores (one for each worker, by routing id) and the records of all requests."""

    def __init__(self) -> None:
        self.cores: dict[bytes, Core] = {}
        self.num_stale = 0  # messages about unknown requests or other attempts
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

    def submit(self, submit: Submit, workers: list[bytes], tokenizer: bytes, detokenizer: bytes) -> Record:
        """Gives a request to the worker that holds most of its prefix, among equals to the one with least to do.

        Args:
            submit: a request whose id has no record.
            workers: those that take new requests, at least one.
            tokenizer: whose client gets the answer.
            detokenizer: which makes it text.

        Raises:
            RequestRefusedError: it cannot run there.
        """

        def preference(worker: bytes) -> tuple[int, int]:
            core = self.cores[worker]
            num_cached = core.ledger.cache.peek(submit.cache_root, submit.prompt_token_ids)
            return num_cached, -core.num_open

        worker = workers[0] if len(workers) == 1 else max(workers, key=preference)
        record = Record(self.cores[worker].submit(submit, detokenizer), worker, tokenizer, detokenizer)
        self._records[submit.request_id] = record
        self._num_open_of[detokenizer] += 1
        return record

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
        if core is None:
            return []
        ended = [core.end(request, Finish.BACKEND_LOST) for request in core.open_requests]
        return [item for item in ended if item is not None]

    def _close(self, record: Record) -> None:
        self._num_open_of[record.detokenizer] -= 1
        if not self._num_open_of[record.detokenizer]:
            del self._num_open_of[record.detokenizer]
