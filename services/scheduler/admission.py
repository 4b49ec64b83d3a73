"""scheduler: the sizes that a core works with, and what it refuses at the door.

What can never run is refused at once with the numbers named, instead of waiting at the head of the queue for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.runtime.capacity import WHOLE_PROMPTS, step_problem
from services.scheduler.proposer import SpeculationLimits
from services.scheduler.request import is_producing
from services.wire.request_params import Task
from services.wire.requests import Submit

_LEAST_CHUNK = 16
"""However long the context: a step reads all weights for it."""

_ALONE = 2
"""Times the measured chunk that a step may hold where nobody is being answered: what all chunks have in common, weights
read and threads woken, is then paid half as often, and whoever comes meanwhile waits for two chunks' time."""


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Sizes of a worker and settings of the operator.

    Attributes:
        num_pages, page_size: the KV pool.
        max_model_len: most tokens of prompt and answer together.
        vocab_size: ids that the model may be given are [0, vocab_size).
        logits_width: ids that it can produce are [0, logits_width).
        max_rows: most requests that run at once.
        token_budget: most tokens of a step, at least max_rows.
        chunk_tokens: most prompt tokens of a step beside decodes, or WHOLE_PROMPTS to never cut a prompt.
        max_waiting: most requests that wait to be admitted.
        plans_ahead: plans that may go out before the result of the last, 0 to 4.
        caches_prefixes: whether pages are used again by requests with the same prefix.
        speculation: how much may be proposed; None: nothing.
        chunk_context: tokens of context behind which a prompt token takes twice as long as those of a chunk at the
            beginning of a prompt; 0: chunks are as long behind any.
        chunk_us: microseconds that the worker's chunk took when it was measured.
        chunk_limit_us: microseconds that one may take; 0: chunks are not corrected by what steps take.

    Raises:
        ValueError: sizes that cannot work together; names them.
    """

    num_pages: int
    page_size: int
    max_model_len: int
    vocab_size: int
    logits_width: int
    max_rows: int
    token_budget: int
    chunk_tokens: int
    max_waiting: int
    plans_ahead: int
    caches_prefixes: bool = True
    speculation: SpeculationLimits | None = None
    chunk_context: int = 0
    chunk_us: float = 0.0
    chunk_limit_us: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what cannot work."""
        if min(self.num_pages, self.page_size, self.max_rows, self.vocab_size, self.logits_width) < 1:
            raise ValueError("pages, rows and vocabulary must not be empty")
        if self.max_total_tokens < 2:
            raise ValueError(f"{self.max_total_tokens} tokens of context and KV pool hold no prompt and answer")
        if not 0 <= self.plans_ahead <= 4:
            raise ValueError(f"plans ahead must be 0 to 4, not {self.plans_ahead}")
        whole_prompt = 0 if self.is_chunked else self.max_total_tokens
        if problem := step_problem(self.token_budget, self.max_rows, whole_prompt):
            raise ValueError(problem)
        if self.is_chunked and self.chunk_tokens < 1:
            raise ValueError(f"a prefill chunk of {self.chunk_tokens} tokens")

    @property
    def is_chunked(self) -> bool:
        """Whether prompts may be cut."""
        return self.chunk_tokens != WHOLE_PROMPTS

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_pages * self.page_size

    @property
    def max_open(self) -> int:
        """Most requests that it can hold at once, in rows and in the queue."""
        return self.max_rows + self.max_waiting

    @property
    def max_total_tokens(self) -> int:
        """Most prompt and output tokens of one request."""
        return min(self.max_model_len, self.pool_tokens)

    def prefill_budget(self, num_decodes: int) -> int:
        """Prompt tokens that fit into a step beside so many decodes."""
        left = self.token_budget - num_decodes
        if not self.is_chunked:
            return left
        holds_up_nobody = not num_decodes and self.chunk_limit_us > 0
        return min(left, self.chunk_tokens * (_ALONE if holds_up_nobody else 1))

    def most_behind(self, context: int, budget: int) -> int:
        """Tokens behind so much context that take as long as `budget` tokens at the beginning of a prompt."""
        if not self.chunk_context:
            return budget
        return max(min(budget, _LEAST_CHUNK), budget * self.chunk_context // (self.chunk_context + context))

    def budget_after(self, budget: int, context: int, num_tokens: int) -> int:
        """What is left of a budget after so many tokens behind so much context: nothing when they were the most."""
        if num_tokens >= self.most_behind(context, budget):
            return 0
        return max(0, budget - self.prompt_cost(num_tokens, context))

    def prompt_cost(self, num_tokens: int, context: int) -> int:
        """Tokens at the beginning of a prompt that take as long as so many behind so much context."""
        return num_tokens + (num_tokens * context // self.chunk_context if self.chunk_context else 0)


class RequestRefusedError(Exception):
    """A request that is not taken; becomes an HTTP status.

    Attributes:
        status: the HTTP status, 400 or 503.
        code: the machine-readable reason.
        param: the field to blame, or "".
    """

    def __init__(self, status: int, code: str, text: str, param: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param


def check_fits(submit: Submit, limits: CoreLimits, num_waiting: int, num_free_rows: int) -> int:
    """Decides whether a request can run here at all.

    The queue is full when `max_waiting` wait beside those that free rows await, who are as good as admitted.

    Returns:
        Tokens of prompt and answer at which it ends at the latest: by max_tokens, context or KV pool.

    Raises:
        RequestRefusedError: 400 when it can never run, 503 when the queue is full.
    """
    prompt = np.frombuffer(submit.prompt_token_ids, "<i4")
    outputs = np.frombuffer(submit.output_token_ids, "<i4")
    if not len(prompt):
        raise RequestRefusedError(400, "invalid_prompt", "The prompt has no tokens.", "prompt")
    if prompt.min() < 0 or prompt.max() >= limits.vocab_size:
        text = f"The prompt holds a token id outside [0, {limits.vocab_size})."
        raise RequestRefusedError(400, "invalid_prompt", text, "prompt")
    if len(outputs) and (outputs.min() < 0 or outputs.max() >= limits.logits_width):
        text = f"The answer to go on with holds a token id outside [0, {limits.logits_width})."
        raise RequestRefusedError(400, "invalid_prompt", text, "prompt")
    if len(outputs) and submit.prompt.task is not Task.GENERATE:
        raise RequestRefusedError(400, "invalid_prompt", "What is to be pooled has no answer to go on with.", "prompt")
    least_answer = int(is_producing(submit))
    if len(prompt) + least_answer > limits.max_model_len:
        text = f"The prompt has {len(prompt)} tokens; the context of {limits.max_model_len} " + (
            "leaves nothing for an answer." if least_answer else "does not hold it."
        )
        raise RequestRefusedError(400, "context_length_exceeded", text, "prompt")
    if len(prompt) + least_answer > limits.pool_tokens:
        text = (
            f"The prompt has {len(prompt)} tokens; the KV pool holds {limits.pool_tokens} in all "
            f"({limits.num_pages} pages of {limits.page_size}), so at most {limits.pool_tokens - least_answer} fit."
        )
        raise RequestRefusedError(400, "kv_pool_exceeded", text, "prompt")
    if num_waiting >= limits.max_waiting + num_free_rows:
        text = f"The queue is full: {num_waiting} requests are waiting, the limit is {limits.max_waiting}."
        raise RequestRefusedError(503, "queue_full", text)
    return min(len(prompt) + submit.max_tokens * least_answer, limits.max_total_tokens)
