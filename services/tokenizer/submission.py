"""Tokenizer process: a checked request and its prompts to the messages that ask for its answers.

One `Submit` for each answer, prompts first, choices within: prompt 0 choice 0, prompt 0 choice 1, prompt 1 choice 0 ...
Everything that a token depends on is decided here, once, and journalled: the seed too, when the client gave none.
Pure but for the drawing of ids and seeds.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from services.tokenizer.request_limits import ServedModel, final_token_ids, min_tokens, stop_token_ids
from services.tokenizer.sampling_body import SamplingBody
from services.wire.columns import REQUEST_ID_BYTES, pack_int32
from services.wire.request_params import (
    NO_LOGPROBS,
    PLAIN_PROMPT,
    Grammar,
    LogitRules,
    PromptParams,
    SamplingParams,
    TextParams,
)
from services.wire.requests import Submit

_ROOT_BYTES = 16
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
        grammar_param: The field that it came in, for errors.
        shows_special_tokens: Whether a parser needs control tokens in the text, whatever the client asked.
        num_logprobs: As the body's own, for APIs that have other fields for it.
    """

    body: SamplingBody
    prompts: Sequence[Prompt]
    request_id: bytes = field(default_factory=new_request_id)
    grammar: Grammar | None = None
    grammar_param: str | None = None
    shows_special_tokens: bool = False
    num_logprobs: int = NO_LOGPROBS

    @property
    def num_answer_logprobs(self) -> int:
        """How many of the likeliest tokens are told at each place of the answers; NO_LOGPROBS for none at all."""
        return max(self.num_logprobs, self.body.num_logprobs)

    @property
    def num_answers(self) -> int:
        """Prompts times choices."""
        return len(self.prompts) * self.body.num_choices


@dataclass(frozen=True)
class Asker:
    """What the messages of a request hold beside its own words.

    Attributes:
        tenant: Who asks.
        isolates_cache: Whether no prefix is shared with other tenants.
        elapsed_s: How long ago the request came: so much of its time is over.
        rules: What is done to the logits; None for nothing.
    """

    tenant: str
    isolates_cache: bool = False
    elapsed_s: float = 0.0
    rules: LogitRules | None = None


def build_submits(wanted: AnswersWanted, model: ServedModel, asker: Asker) -> list[Submit]:
    """The messages for all answers of a request, in the order of their indexes."""
    body = wanted.body
    text = TextParams(
        stop=body.stop_strings,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False and not wanted.shows_special_tokens,
        min_tokens=min_tokens(body, model),
    )
    sampling = _sampling(wanted, model, asker.rules)
    stop_ids = pack_int32(stop_token_ids(body, model))
    final_ids = pack_int32(final_token_ids(body, model, wanted.grammar is not None))
    root = cache_root(body.cache_salt or "", asker.tenant if asker.isolates_cache else "")
    submits: list[Submit] = []
    for index, prompt in enumerate(wanted.prompts):
        request_id = new_request_id() if index else wanted.request_id
        first = Submit(
            request_id=request_id,
            attempt=0,  # the first time that it is asked for, and nothing was answered before
            prompt_token_ids=pack_int32(prompt.token_ids),
            output_token_ids=b"",
            sampling=sampling[0],
            text=text,
            max_tokens=prompt.max_tokens,
            stop_token_ids=stop_ids,
            group_id=request_id,
            tenant=asker.tenant,
            cache_root=root,
            priority=body.priority or 0,
            deadline_ms=_deadline_ms(body, asker.elapsed_s),
            prompt=prompt.asks,
            final_token_ids=final_ids,
        )
        siblings = [
            # one of them is enough to ask for what the prompt itself gives
            replace(first, request_id=new_request_id(), sampling=one, prompt=PLAIN_PROMPT)
            for one in sampling[1:]
        ]
        submits += [first, *siblings]
    return submits


def cache_root(salt: str, tenant: str) -> bytes:
    """Names a prefix cache of its own for each salt and tenant; b"" is the one that all others share."""
    if not salt and not tenant:
        return b""
    parts = b"\0".join((tenant.encode(), salt.encode()))
    return hashlib.blake2b(parts, digest_size=_ROOT_BYTES).digest()


def _deadline_ms(body: SamplingBody, elapsed_s: float) -> int:
    """0 for none; a time that is over already still names one."""
    return 0 if body.timeout_s is None else max(1, math.ceil((body.timeout_s - elapsed_s) * 1000))


def sampling_defaults(model: ServedModel) -> dict[str, float]:
    """What a request gets that says nothing of how it is drawn: the model's word, then OpenAI's."""
    [drawn] = _sampling(AnswersWanted(SamplingBody(), ()), model, None)
    return {name: getattr(drawn, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def _sampling(wanted: AnswersWanted, model: ServedModel, rules: LogitRules | None) -> list[SamplingParams]:
    """One for each choice: the client's word, then the model's, then OpenAI's."""
    body, defaults = wanted.body, model.defaults
    temperature = _first(body.temperature, defaults.temperature, 1.0)
    top_p = _first(body.top_p, defaults.top_p, 1.0)
    top_k = _first(body.top_k, defaults.top_k, 0)
    if top_p == 0:  # an empty nucleus is its limit: the likeliest token alone
        temperature, top_p = 0.0, 1.0
    if not 0 < top_k < model.num_entries:  # as many as there are is no limit, and must draw like none
        top_k = 0
    first = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        choice=0,
        rules=rules,
        grammar=wanted.grammar,
        num_logprobs=wanted.num_answer_logprobs,
    )
    return [replace(first, choice=choice) for choice in range(body.num_choices)]


def _first(asked: Number | None, of_model: Number | None, otherwise: Number) -> Number:
    if asked is not None:
        return asked
    return otherwise if of_model is None else of_model
