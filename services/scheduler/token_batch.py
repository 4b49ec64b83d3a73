"""scheduler: the columns of one `TokensProduced`, collected row by row."""

from __future__ import annotations

from services.scheduler.request import Request
from services.wire.columns import pack_int32
from services.wire.messages import Finish, TokensProduced


class TokenBatch:
    """New ids of many answers for one detokenizer."""

    def __init__(self) -> None:
        self._request_ids: list[bytes] = []
        self._attempts: list[int] = []
        self._first_indexes: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []
        self._finishes = bytearray()
        self._cached_tokens: list[int] = []

    def add(self, request: Request, first_index: int, token_ids: list[int], finish: Finish) -> None:
        """Adds a row: ids from output index `first_index` on, and why the answer ends with them, if it does."""
        self._request_ids.append(request.submit.request_id)
        self._attempts.append(request.submit.attempt)
        self._first_indexes.append(first_index)
        self._counts.append(len(token_ids))
        self._token_ids += token_ids
        self._finishes.append(finish)
        self._cached_tokens.append(max(request.cached_tokens, 0))

    def message(self) -> TokensProduced:
        """The message."""
        return TokensProduced(
            request_ids=b"".join(self._request_ids),
            attempts=pack_int32(self._attempts),
            first_indexes=pack_int32(self._first_indexes),
            counts=pack_int32(self._counts),
            token_ids=pack_int32(self._token_ids),
            finishes=bytes(self._finishes),
            cached_tokens=pack_int32(self._cached_tokens),
        )
