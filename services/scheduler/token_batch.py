"""scheduler: the columns of `TokensProduced`, collected row by row."""

from __future__ import annotations

from services.scheduler.request import Request
from services.wire.columns import pack_int32
from services.wire.messages import Finish, TokensProduced

MAX_IDS = 2**20  # ids in a message (4 MiB); the row that passes it is the last


class TokenBatch:
    """New ids of many answers for one detokenizer."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int, int, int, int, int]] = []
        self._token_ids: list[int] = []
        self._full: list[TokensProduced] = []

    def add(self, request: Request, first_index: int, token_ids: list[int], finish: Finish) -> None:
        """Adds a row: ids from output index `first_index` on, and why the answer ends with them, if it does."""
        submit = request.submit
        cached_tokens = max(request.cached_tokens, 0)
        self._rows.append((submit.request_id, submit.attempt, first_index, len(token_ids), finish, cached_tokens))
        self._token_ids += token_ids
        if len(self._token_ids) >= MAX_IDS:
            self._close()

    def messages(self) -> list[TokensProduced]:
        """What was added, in order: one message, unless many long answers are sent again."""
        if self._rows:
            self._close()
        return self._full

    def _close(self) -> None:
        request_ids, attempts, first_indexes, counts, finishes, cached_tokens = zip(*self._rows, strict=True)
        self._full.append(
            TokensProduced(
                request_ids=b"".join(request_ids),
                attempts=pack_int32(attempts),
                first_indexes=pack_int32(first_indexes),
                counts=pack_int32(counts),
                token_ids=pack_int32(self._token_ids),
                finishes=bytes(finishes),
                cached_tokens=pack_int32(cached_tokens),
            )
        )
        self._rows, self._token_ids = [], []
