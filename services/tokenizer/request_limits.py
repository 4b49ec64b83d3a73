"""Tokenizer process: which prompts the model takes and how long an answer may get.

Pure functions of the request, the model and the scheduler's word on the KV pool; the numbers are in every message. What
a text's size alone decides is refused in `text_encoder`, before encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.model_files.generation_config import SamplingDefaults
from services.tokenizer.api_error import ApiError, Code, bad_field
from services.tokenizer.sampling_body import SamplingBody

DEFAULT_COMPLETION_TOKENS = 16  # as in the reference; a chat without a limit runs to the end of the context


@dataclass(frozen=True)
class ServedModel:
    """What the checks need to know of the model.

    Attributes:
        name: As in /v1/models and in every answer.
        created: Unix seconds; when this process took the model up.
        context_tokens: Most tokens of prompt + answer that the model takes.
        num_entries: Ids from 0 up to here, exclusive, are in the vocabulary.
        end_token_ids: Ids that end an answer.
        embedding_size: Numbers of a hidden state.
        fingerprint: Equal for processes that serve the same model in the same way.
        defaults: What a request gets for what it leaves out.
        embedding_size: Numbers of a hidden state.
    """

    name: str
    created: int
    context_tokens: int
    num_entries: int
    end_token_ids: frozenset[int]
    fingerprint: str
    embedding_size: int
    defaults: SamplingDefaults


def check_token_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Refuses ids that are not in the vocabulary.

    Raises:
        ApiError: 400 naming the first wrong one.
    """
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= model.num_entries):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < model.num_entries)
        raise bad_field(param, f"{_shortened(wrong)} is no token id, they are 0 to {model.num_entries - 1}")


def stop_token_ids(body: SamplingBody, model: ServedModel) -> list[int]:
    """The ids that end an answer: the client's own, and the model's unless they are to be ignored."""
    return sorted({*(() if body.ignore_eos else model.end_token_ids), *(body.stop_token_ids or ())})


def min_tokens(body: SamplingBody, model: ServedModel) -> int:
    """Below how many tokens no id ends an answer; 0 where only such ids may come: it ends with the first."""
    allowed = body.allowed_token_ids
    if allowed and set(allowed) <= set(stop_token_ids(body, model)):
        return 0
    return body.min_tokens or 0


def final_token_ids(body: SamplingBody, model: ServedModel, has_grammar: bool) -> list[int]:
    """The ids that end an answer below `min_tokens` too: behind a whole sentence of a grammar nothing else can come."""
    return sorted(model.end_token_ids) if has_grammar and body.min_tokens else []


def truncated(token_ids: Sequence[int], body: SamplingBody, max_total_tokens: int, model: ServedModel) -> Sequence[int]:
    """The end of a prompt that `truncate_prompt_tokens` leaves of it; for -1 as much as fits before the answer."""
    kept = body.truncate_prompt_tokens
    if kept is None:
        return token_ids
    if kept == -1:
        wanted = 1 if body.wanted_tokens is None else body.wanted_tokens
        kept = max(1, min(max_total_tokens, model.context_tokens) - wanted)
    return token_ids[-kept:]


def answer_limit(
    num_prompt_tokens: int, wanted: int | None, max_total_tokens: int, model: ServedModel, param: str
) -> int:
    """How many tokens an answer may have: what was asked for, clamped to what fits behind the prompt.

    Args:
        num_prompt_tokens: At least 1.
        wanted: None for as many as fit; 0 when only the prompt is to be computed, which may then fill the context.
        max_total_tokens: Most tokens of prompt + answer, by the context and the KV pool of the present workers.
        model: The context.
        param: The field that the prompt came in.

    Raises:
        ApiError: 400 `context_length_exceeded`: no room for a single token behind the prompt, or for the prompt itself.
    """
    fits = min(max_total_tokens, model.context_tokens)
    room = fits - num_prompt_tokens
    if room < (0 if wanted == 0 else 1):
        limit = (
            f"the context is {model.context_tokens} tokens"
            if fits == model.context_tokens
            else f"the KV pool holds {fits} tokens"
        )
        message = f"the prompt has {num_prompt_tokens} tokens and {limit}, prompt and answer together"
        raise ApiError(400, message, code=Code.CONTEXT_LENGTH_EXCEEDED, param=param)
    return room if wanted is None else min(wanted, room)


def _shortened(number: int) -> str:
    return str(number) if abs(number) < 2**63 else f"an integer of {number.bit_length()} bits"
