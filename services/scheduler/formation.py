"""scheduler: decodes that go in lockstep, as columns: what a step of theirs is made of, and what it brings.

A `Formation` never changes: who joins or leaves makes another one, by cutting and joining bytes. A `March` is a
formation in one step that is in flight. Position i of every column is one request; a column that depends on the step is
kept as it was in one step, and the steps since are added.

A turn of the scheduler finds its caches cold, so what counts is how much is touched: bytes that are compared and joined
as they are, and no array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from services.scheduler.outcomes import TokenRun
from services.scheduler.radix_cache import TOKEN_BYTES
from services.scheduler.request import Request, StepClock
from services.scheduler.tenants import TenantAccount
from services.wire.columns import REQUEST_ID_BYTES, pack_int32, plus_int32, without_places
from services.wire.steps import StepResult

T = TypeVar("T")
_INT = TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Formation:
    """The requests of one lane that go in lockstep.

    In step `step` request i computes position `starts[i]` and samples the output token of index `first_indexes[i]`; in
    each later one that it is part of, the next.
    """

    lane: bytes
    step: int = 0
    requests: list[Request] = field(default_factory=list)
    starts: bytes = b""
    first_indexes: bytes = b""
    rows: bytes = b""
    request_ids: bytes = b""
    attempts: bytes = b""
    cached_tokens: bytes = b""
    accounts: dict[TenantAccount, int] = field(default_factory=dict)  # how many requests of each tenant

    def __len__(self) -> int:
        return len(self.requests)

    def joined_by(self, requests: list[Request], step: int) -> Formation:
        """With these behind the others; they have joined at this step, which is planned next."""
        starts = [request.num_planned for request in requests]
        first_indexes = [start + 1 - request.num_prompt for start, request in zip(starts, requests, strict=True)]
        accounts = dict(self.accounts)
        for request in requests:
            accounts[request.account] = accounts.get(request.account, 0) + 1
        return Formation(
            lane=self.lane,
            step=step,
            requests=self.requests + requests,
            starts=self.starts_of(step) + pack_int32(starts),
            first_indexes=self.indexes_of(step) + pack_int32(first_indexes),
            rows=self.rows + pack_int32(request.row for request in requests),
            request_ids=self.request_ids + b"".join([request.request_id for request in requests]),
            attempts=self.attempts + pack_int32(request.attempt for request in requests),
            cached_tokens=self.cached_tokens + pack_int32(max(request.cached_tokens, 0) for request in requests),
            accounts=accounts,
        )

    def without(self, place: int) -> Formation:
        """Without the request at that place."""
        accounts = dict(self.accounts)
        account = self.requests[place].account
        accounts[account] -= 1
        if not accounts[account]:
            del accounts[account]
        gone = (place,)
        return Formation(
            lane=self.lane,
            step=self.step,
            requests=_cut_list(self.requests, gone),
            starts=without_places(self.starts, gone, _INT),
            first_indexes=without_places(self.first_indexes, gone, _INT),
            rows=without_places(self.rows, gone, _INT),
            request_ids=without_places(self.request_ids, gone, REQUEST_ID_BYTES),
            attempts=without_places(self.attempts, gone, _INT),
            cached_tokens=without_places(self.cached_tokens, gone, _INT),
            accounts=accounts,
        )

    def starts_of(self, step: int) -> bytes:
        """The positions that a step computes, as an int32 column."""
        return plus_int32(self.starts, step - self.step)

    def indexes_of(self, step: int) -> bytes:
        """The output indexes that a step samples, as an int32 column."""
        return plus_int32(self.first_indexes, step - self.step)


@dataclass(slots=True)
class March:
    """A formation in one step that is in flight; those at the places of `left` go their own ways by now."""

    formation: Formation
    left: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.formation)

    def leave(self, request: Request) -> None:
        """A request of the formation leaves the lockstep before the result has come."""
        self.left.add(self.formation.requests.index(request))

    def take(self, clock: StepClock, step: int, id_column: bytes, first_indexes: bytes) -> TokenRun:
        """Notes the ids of all who have not left; those are taken one by one.

        Args:
            clock: where the ids are noted. That of a request that has left is nobody's: who has its row now joined
                later.
            step: which step.
            id_column: one for each request.
            first_indexes: their output indexes.
        """
        formation, apart = self.formation, self.left
        clock.note(step, formation.rows, id_column)
        request_ids, attempts, cached_tokens = formation.request_ids, formation.attempts, formation.cached_tokens
        if apart:
            places = sorted(apart)
            ints = (id_column, first_indexes, attempts, cached_tokens)
            id_column, first_indexes, attempts, cached_tokens = (without_places(each, places, _INT) for each in ints)
            request_ids = without_places(request_ids, places, REQUEST_ID_BYTES)
        for account, num_requests in formation.accounts.items():
            account.served_tokens += num_requests
        for place in apart:
            formation.requests[place].account.served_tokens -= 1
        return TokenRun(formation.lane, request_ids, attempts, first_indexes, id_column, cached_tokens)


def marching_ids(marches: Sequence[March], result: StepResult) -> bytes | None:
    """The column of ids of those that went in lockstep, if the result begins with exactly one id for each of them.

    Else None: something in it is special, and it must be read row by row.
    """
    rows, request_ids, attempts, first_indexes = _columns(marches, result.step)
    num_bytes = len(rows)
    num_rows = num_bytes // _INT
    fits = (
        result.rows.startswith(rows)
        and result.request_ids.startswith(request_ids)
        and result.attempts.startswith(attempts)
        and result.first_indexes.startswith(first_indexes)
        and result.counts.startswith(_ONE * num_rows)
        and result.finishes.startswith(bytes(num_rows))
        and (not result.logprob_counts or result.logprob_counts.startswith(bytes(num_bytes)))
    )
    return result.token_ids[:num_bytes] if fits else None


_ONE = pack_int32([1])


def _columns(marches: Sequence[March], step: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Rows, request ids, attempts and output indexes of all of them in a step."""
    if len(marches) == 1:  # one detokenizer
        only = marches[0].formation
        return only.rows, only.request_ids, only.attempts, only.indexes_of(step)
    formations = [march.formation for march in marches]
    columns = [(each.rows, each.request_ids, each.attempts, each.indexes_of(step)) for each in formations]
    rows, request_ids, attempts, first_indexes = zip(*columns, strict=True) if columns else ((), (), (), ())
    return b"".join(rows), b"".join(request_ids), b"".join(attempts), b"".join(first_indexes)


def _cut_list(items: list[T], places: Sequence[int]) -> list[T]:
    kept = items.copy()
    for place in reversed(places):
        del kept[place]
    return kept
