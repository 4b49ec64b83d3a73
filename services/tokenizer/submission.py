"""Tokenizer process: a checked request and its prompts to the messages that ask for its answers.

One `Submit` for each answer, prompts first, choices within: prompt 0 choice 0, prompt 0 choice 1, prompt 1 choice 0 ...
Everything that a token depends on is decided here, once, and journalled: the seed too, when the client gave none.
Pure but for the drawing of ids and seeds.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from services.tokenizer.openai_schema import SamplingBody
from services.tokenizer.request_limits import ServedModel
from services.wire.columns import REQUEST_ID_BYTES, pack_int32
from services.wire.messages import PLAIN_PROMPT, Grammar, PromptParams, SamplingParams, Submit, TextParams

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Prompt:
    """One prompt, encoded.

    Attributes:
        token_ids: At least one.
        max_tokens: How long its answers may get; 0 computes the prompt and nothing else.
        text: What the answers begin with, as `echo` asks; "" for nothing.
        asks: What is wanted of the prompt itself.
    """

    token_ids: Sequence[int]
    max_tokens: int
    text: str = ""
    asks: PromptParams = PLAIN_PROMPT


def new_request_id() -> bytes:
    """An id that nobody can guess."""
    return secrets.token_bytes(REQUEST_ID_BYTES)


@dataclass(frozen=True)
class AnswersWanted:
    """All answers of one request.

    Attributes:
        body: How they are drawn and where they end, checked; `n` is answers for each prompt.
        prompts: At least one.
        request_id: The id of the first answer, which its siblings share as `group_id`.
        grammar: What each answer must be a sentence of.
        shows_special_tokens: Whether a parser needs control tokens in the text, whatever the client asked.
    """

    body: SamplingBody
    prompts: Sequence[Prompt]
    request_id: bytes = field(default_factory=new_request_id)
    grammar: Grammar | None = None
    shows_special_tokens: bool = False

    @property
    def num_answers(self) -> int:
        """Prompts times choices."""
        return len(self.prompts) * self.body.num_choices


def build_submits(wanted: AnswersWanted, model: ServedModel, tenant: str) -> list[Submit]:
    """The messages for all answers of a request, in the order of their indexes; `tenant` names who asks."""
    body = wanted.body
    seed = secrets.randbits(63) if body.seed is None else body.seed
    text = TextParams(
        stop=body.stop_strings,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False and not wanted.shows_special_tokens,
        min_tokens=0,
    )
    end_token_ids = set() if body.ignore_eos else set(model.end_token_ids)
    stop_token_ids = pack_int32(sorted(end_token_ids.union(body.stop_token_ids or ())))
    sampling = [replace(one, grammar=wanted.grammar) for one in _sampling(body, model, seed)]
    submits: list[Submit] = []
    for index, prompt in enumerate(wanted.prompts):
        # What no field asks for yet is constant: there are no keys, so one tenant and one cache; `priority`,
        # `cache_salt` and `timeout_s` are refused by name; every request is its first attempt, nothing answered before.
        first = Submit(
            request_id=new_request_id() if index else wanted.request_id,
            attempt=0,
            prompt_token_ids=pack_int32(prompt.token_ids),
            output_token_ids=b"",
            sampling=sampling[0],
            text=text,
            max_tokens=prompt.max_tokens,
            stop_token_ids=stop_token_ids,
            group_id=b"",
            tenant=tenant,
            cache_root=b"",
            priority=0,
            deadline_ms=0,
            prompt=prompt.asks,
        )
        first = replace(first, group_id=first.request_id)
        siblings = [replace(first, request_id=new_request_id(), sampling=one) for one in sampling[1:]]
        submits += [first, *siblings]
    return submits


def _sampling(body: SamplingBody, model: ServedModel, seed: int) -> list[SamplingParams]:
    """One for each choice: the client's word, then the model's, then OpenAI's."""
    defaults = model.defaults
    temperature = _first(body.temperature, defaults.temperature, 1.0)
    top_p = _first(body.top_p, defaults.top_p, 1.0)
    top_k = _first(body.top_k, defaults.top_k, 0)
    min_p = _first(body.min_p, defaults.min_p, 0.0)
    if top_p == 0:  # an empty nucleus is its limit: the likeliest token alone
        temperature, top_p = 0.0, 1.0
    if not 0 < top_k < model.num_entries:  # as many as there are is no limit, and must draw like none
        top_k = 0
    return [SamplingParams(temperature, top_p, top_k, min_p, seed, choice) for choice in range(body.num_choices)]


def _first(asked: Number | None, of_model: Number | None, otherwise: Number) -> Number:
    if asked is not None:
        return asked
    return otherwise if of_model is None else of_model
