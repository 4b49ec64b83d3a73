"""scheduler: what comes out of a core besides plans.

None of these is frozen, though nobody changes one: some are made for each token or step, and a frozen one costs three
times as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.scheduler.radix_cache import TOKEN_BYTES
from services.scheduler.request import Request
from services.wire.answers import TokensProduced
from services.wire.columns import pack_int32, unpack_int32, unpack_request_ids
from services.wire.finish import Finish


@dataclass(slots=True)
class Produced:
    """New tokens of a request, from output index `first_index` on, and why it ended if it did."""

    request: Request
    first_index: int
    token_ids: list[int]
    finish: Finish


@dataclass(slots=True)
class TokenRun:
    """One new token for each of many requests of a lane, none of which ends with it: columns of `TokensProduced`."""

    lane: bytes
    request_ids: bytes
    attempts: bytes
    first_indexes: bytes
    token_ids: bytes
    cached_tokens: bytes

    def __len__(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    def message(self) -> TokensProduced:
        """The run as it travels."""
        num_rows = len(self.token_ids) // TOKEN_BYTES
        return TokensProduced(
            request_ids=self.request_ids,
            attempts=self.attempts,
            first_indexes=self.first_indexes,
            counts=_ONE * num_rows,
            token_ids=self.token_ids,
            finishes=bytes(num_rows),
            cached_tokens=self.cached_tokens,
        )


@dataclass(slots=True)
class StepOutcome:
    """What the result of a step brought. A request stands in at most one run, or in `rows`."""

    rows: list[Produced]
    runs: list[TokenRun]

    def spelled_out(self, requests: Mapping[bytes, Request]) -> Iterator[Produced]:
        """All of it row by row.

        Args:
            requests: those that are open, by id.
        """
        for run in self.runs:
            names = unpack_request_ids(run.request_ids)
            for name, index, token_id in zip(
                names, unpack_int32(run.first_indexes), unpack_int32(run.token_ids), strict=True
            ):
                yield Produced(requests[name], index, [token_id], Finish.NONE)
        yield from self.rows


_ONE = pack_int32([1])
