"""scheduler: the columns of one `TokensProduced`, collected row by row."""

from __future__ import annotations

from services.scheduler.request import Request
from services.wire.columns import pack_int32
from services.wire.messages import Finish, TokensProduced


class TokenBatch:
    """New ids of many answers for one detokenizer."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int, int, int, int, int]] = []
        self._token_ids: list[int] = []

    def add(self, request: Request, first_index: int, token_ids: list[int], finish: Finish) -> None:
        """Adds a row: ids from output index `first_index` on, and why the answer ends with them, if it does."""
        submit = request.submit
        cached_tokens = max(request.cached_tokens, 0)
        self._rows.append((submit.request_id, submit.attempt, first_index, len(token_ids), finish, cached_tokens))
        self._token_ids += token_ids

    def message(self) -> TokensProduced:
        """The message; at least one row was added."""
        request_ids, attempts, first_indexes, counts, finishes, cached_tokens = zip(*self._rows, strict=True)
        return TokensProduced(
            request_ids=b"".join(request_ids),
            attempts=pack_int32(attempts),
            first_indexes=pack_int32(first_indexes),
            counts=pack_int32(counts),
            token_ids=pack_int32(self._token_ids),
            finishes=bytes(finishes),
            cached_tokens=pack_int32(cached_tokens),
        )
