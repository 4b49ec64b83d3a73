"""scheduler: what one worker has been given and has not done, as far as routing must know it. Pure.

    load     tokens of prompts given to it whose first token has not come + ANSWER_TOKENS for each open answer
    promise  the prompt of an open request: the worker computes it, so whoever shares it is as good as cached there

How long an answer becomes nobody knows, so each counts the same. Everything is an addition when a request comes, gives
its first token, or ends: nothing is done for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.radix_cache import TOKEN_BYTES, Node, RadixCache

ANSWER_TOKENS = 128
_LEAST_TOKEN_MS = 1e-6


@dataclass(slots=True)
class Errand:
    """What one request is to its worker: tokens of its prompt that are still to compute, and its promise."""

    num_new: int
    promise: Node | None


class Backlog:
    """The open requests of one worker.

    Args:
        page_size: tokens of its pages: a prefix is shared in whole ones.
        token_ms: how long it computes a token of a prompt, as its card says.
    """

    def __init__(self, page_size: int, token_ms: float) -> None:
        self.token_ms = max(token_ms, _LEAST_TOKEN_MS)
        self.num_routed = 0  # requests
        self.num_given = 0  # tokens of prompts that it had to compute
        self._num_open = 0
        self._num_pending = 0
        self._promises = RadixCache(page_size)  # of its pages only their number counts: they are nowhere

    @property
    def load_ms(self) -> float:
        """How long what is open takes."""
        return self.token_ms * (self._num_pending + ANSWER_TOKENS * self._num_open)

    def promised(self, cache_root: bytes, prompt: bytes) -> int:
        """Tokens at the start of a prompt (int32 column) that an open request has computed or will."""
        return self._promises.peek(cache_root, prompt)

    def give(self, cache_root: bytes, prompt: bytes, num_prefix: int) -> Errand:
        """Takes a request in, of whose prompt (int32 column) `num_prefix` tokens need not be computed."""
        num_tokens = len(prompt) // TOKEN_BYTES
        errand = Errand(num_tokens - num_prefix, None)
        self.num_routed += 1
        self.num_given += errand.num_new
        self._num_pending += errand.num_new
        self._num_open += 1
        num_pages = num_tokens // self._promises.page_size
        if num_pages:
            key = prompt[: num_pages * self._promises.page_size * TOKEN_BYTES]
            errand.promise = self._promises.insert(cache_root, key, [0] * num_pages).node
            self._promises.lock(errand.promise)
        return errand

    def prefilled(self, errand: Errand) -> None:
        """The first token came: its prompt is computed."""
        self._num_pending -= errand.num_new
        errand.num_new = 0

    def end(self, errand: Errand) -> None:
        """The request ended, or went to another worker. Once only."""
        self.prefilled(errand)
        self._num_open -= 1
        self._promises.unlock(errand.promise)
        self._promises.flush()
