"""scheduler: the columns of `TokensProduced`, collected row by row."""

from __future__ import annotations

from services.scheduler.outcomes import TokenRun
from services.scheduler.request import Request
from services.wire.answers import TokensProduced
from services.wire.columns import pack_int32
from services.wire.finish import Finish
from services.wire.joined_rows import joined_rows
from services.wire.logprob_columns import LogprobRun, join_logprobs

MAX_IDS = 2**20  # in a message (4 MiB), those of log-probabilities counted twice; the row that passes it is the last
MAX_IDS_OF_A_ROW = 4_096  # a longer run, an answer that is sent again, becomes several rows


class TokenBatch:
    """New ids of many answers for one detokenizer, in the order in which they were added."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int, int, int, int, int]] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[int, LogprobRun] = {}  # by place of the row: of those who asked
        self._num_ids = 0  # of rows and parts; those of log-probabilities count twice
        self._parts: list[TokensProduced] = []
        self._full: list[TokensProduced] = []

    def add(self, request: Request, first_index: int, token_ids: list[int], finish: Finish) -> None:
        """Adds a row: ids from output index `first_index` on, and why the answer ends with them, if it does.

        The log-probabilities of the ids come from the request's record, if it has one.
        """
        if len(token_ids) > MAX_IDS_OF_A_ROW:
            self._add_in_pieces(request, first_index, token_ids, finish)
            return
        submit = request.submit
        cached_tokens = max(request.cached_tokens, 0)
        if request.logprobs is not None and token_ids:
            run = request.logprobs.between(first_index, first_index + len(token_ids))
            self._logprobs[len(self._rows)] = run
            self._num_ids += 2 * run.num_entries
        self._rows.append((submit.request_id, submit.attempt, first_index, len(token_ids), finish, cached_tokens))
        self._token_ids += token_ids
        self._count(len(token_ids))

    def add_run(self, run: TokenRun) -> None:
        """Adds a row for each request of a run."""
        self._end_rows()
        self._parts.append(run.message())
        self._count(len(run))

    def messages(self) -> list[TokensProduced]:
        """What was added, in order: one message, unless many long answers are sent again."""
        self._close()
        return self._full

    def _count(self, num_ids: int) -> None:
        self._num_ids += num_ids
        if self._num_ids >= MAX_IDS:
            self._close()

    def _add_in_pieces(self, request: Request, first_index: int, token_ids: list[int], finish: Finish) -> None:
        for start in range(0, len(token_ids), MAX_IDS_OF_A_ROW):
            piece = token_ids[start : start + MAX_IDS_OF_A_ROW]
            is_last = start + len(piece) == len(token_ids)
            self.add(request, first_index + start, piece, finish if is_last else Finish.NONE)

    def _end_rows(self) -> None:
        """Makes a part of the rows so far."""
        if not self._rows:
            return
        request_ids, attempts, first_indexes, counts, finishes, cached_tokens = zip(*self._rows, strict=True)
        logprobs = (b"", b"", b"")
        if self._logprobs:
            logprobs = join_logprobs([self._logprobs.get(place) for place in range(len(counts))], counts)
        self._parts.append(
            TokensProduced(
                request_ids=b"".join(request_ids),
                attempts=pack_int32(attempts),
                first_indexes=pack_int32(first_indexes),
                counts=pack_int32(counts),
                token_ids=pack_int32(self._token_ids),
                finishes=bytes(finishes),
                cached_tokens=pack_int32(cached_tokens),
                logprob_counts=logprobs[0],
                logprob_ids=logprobs[1],
                logprobs=logprobs[2],
            )
        )
        self._rows, self._token_ids, self._logprobs = [], [], {}

    def _close(self) -> None:
        self._end_rows()
        parts, self._parts, self._num_ids = self._parts, [], 0
        if parts:
            self._full.append(joined_rows(parts))
