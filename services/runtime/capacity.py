"""What settings say about the sizes of a step and of the KV pool: the worker and the scheduler compute the same.

Rules that can be told from settings alone, from settings and a model's context, or only from a worker that runs, are
here once: each process asks with what it knows by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.runtime.config import Settings

WHOLE_PROMPTS = -1
"""As `chunked_prefill_size`: a prompt is never cut."""

LEAST_ASKED_TOKENS = 64
"""A pool of fewer holds no chat of a sentence and its answer."""


def asked_pool_tokens(settings: Settings) -> int:
    """Tokens of the pool that `--kv-cache-tokens` asks for, in whole pages; 0: what memory allows."""
    return -(-settings.kv_cache_tokens // settings.page_size) * settings.page_size


def step_tokens(settings: Settings, chunk_tokens: int, largest_prompt: int, max_rows: int) -> int:
    """Most tokens of a step.

    Args:
        settings: the operator's.
        chunk_tokens: most prompt tokens of a step, or WHOLE_PROMPTS.
        largest_prompt: tokens of the largest request that can run.
        max_rows: requests that run at once.
    """
    prompt_tokens = largest_prompt if chunk_tokens == WHOLE_PROMPTS else chunk_tokens
    return settings.max_num_batched_tokens or prompt_tokens + max_rows


def asked_step_tokens(settings: Settings, measured_chunk: int, context: int) -> int:
    """The same as far as can be told before there is a pool.

    Args:
        settings: the operator's.
        measured_chunk: most prompt tokens of a step where the settings do not say.
        context: most tokens of a request.
    """
    chunk_tokens = settings.chunked_prefill_size or measured_chunk
    largest_prompt = min(context, asked_pool_tokens(settings) or context)
    return step_tokens(settings, chunk_tokens, largest_prompt, settings.max_running_requests)


def step_problem(num_tokens: int, max_rows: int, whole_prompt: int = 0) -> str:
    """Why a step of so many tokens is too small, "" where it is not.

    Args:
        num_tokens: most of a step.
        max_rows: requests that run at once.
        whole_prompt: tokens of the largest request where prompts are never cut; 0 where they are.
    """
    if num_tokens < max_rows:
        return (
            f"a step of {num_tokens} tokens cannot hold {max_rows} running requests: "
            "raise --max-num-batched-tokens or lower --max-running-requests"
        )
    if whole_prompt and num_tokens < whole_prompt + max_rows:
        return (
            "without chunks a step must hold a whole prompt beside all running requests, "
            f"{whole_prompt} + {max_rows} tokens: --max-num-batched-tokens is {num_tokens}"
        )
    return ""


def asked_step_problem(settings: Settings, context: int) -> str:
    """The same of the step that the settings ask for, as far as can be told before there is a pool.

    Args:
        settings: the operator's.
        context: most tokens of a request; 0 while the model's is not known.
    """
    if not settings.max_num_batched_tokens:
        return ""
    is_whole = settings.chunked_prefill_size == WHOLE_PROMPTS
    whole_prompt = min(context, asked_pool_tokens(settings)) if is_whole else 0
    return step_problem(settings.max_num_batched_tokens, settings.max_running_requests, whole_prompt)


def asked_pool_problem(settings: Settings) -> str:
    """Why the context or the pool that the settings ask for holds no request worth the name, "" where it does."""
    if settings.max_model_len == 1:
        return "--max-model-len 1 holds no prompt and answer: set 2 or more"
    num_tokens, least = (
        asked_pool_tokens(settings),
        min(settings.max_model_len or LEAST_ASKED_TOKENS, LEAST_ASKED_TOKENS),
    )
    if not 0 < num_tokens < least:
        return ""
    num_pages = num_tokens // settings.page_size
    return (
        f"--kv-cache-tokens {settings.kv_cache_tokens} is a pool of {num_tokens} tokens ({num_pages} of "
        f"--page-size {settings.page_size}), too small for a prompt and its answer: "
        f"set {least} or more, or leave it out"
    )
