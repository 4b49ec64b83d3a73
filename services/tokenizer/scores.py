"""Tokenizer process: POST /v1/score: how likely the model finds given continuations of a prompt.

    prompt          ids [0 ... start)           the longest beginning that prompt and prompt + continuation share
    continuation    ids [start ... end)         each scored: its log-probability behind all ids before it

Each continuation is one prefill and nothing is drawn; what they share of the prompt comes from the cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from services.runtime.config import Settings
from services.tokenizer.answer_ids import AnswerKind
from services.tokenizer.answer_parts import AnswerDelta, TokenLogprobs
from services.tokenizer.api_error import bad_field, internal_error
from services.tokenizer.embeddings import PROMPT_ALONE, prompt_usage
from services.tokenizer.generation import Generation
from services.tokenizer.json_answer import answer_headers, json_answer
from services.tokenizer.logprob_forms import FLOOR
from services.tokenizer.prompts import PromptMaker
from services.tokenizer.raw_inputs import TokenIds
from services.tokenizer.request_body import BodyForm
from services.tokenizer.request_limits import ServedModel, check_token_ids
from services.tokenizer.submission import AnswersWanted, Prompt
from services.wire.request_params import PromptParams

Text = Annotated[str, Meta(min_length=1)]


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/score: prompt and continuations, all as texts or all as token ids."""

    prompt: Text | TokenIds
    continuations: Annotated[list[Text | TokenIds], Meta(min_length=1)]
    model: str | None = None
    add_special_tokens: bool | None = None


# The fields of the other kind of score, a similarity of texts, are refused by name.
SCORE_FORM = BodyForm(
    ScoreBody,
    {"text_1": (), "text_2": (), "queries": (), "documents": (), "items": (), "truncate_prompt_tokens": ()},
    frozenset({"user", "request_id", "rid"}),
)


@dataclass(frozen=True)
class _Scored:
    """The ids of prompt and continuation, and where the continuation begins."""

    token_ids: Sequence[int]
    start: int


class Scores:
    """The route of scores."""

    def __init__(self, settings: Settings, model: ServedModel, prompts: PromptMaker, generation: Generation) -> None:
        self._settings = settings
        self._model = model
        self._prompts = prompts
        self._generation = generation

    async def create(self, request: web.BaseRequest) -> web.StreamResponse:
        """The log-probability of each continuation.

        Raises:
            ApiError: it is refused, or fails.
        """
        received = await self._generation.receive(request)
        body, ignored = SCORE_FORM.parse(received.fields, self._settings)
        self._generation.check_model(body.model)
        if len(body.continuations) > self._settings.max_prompts:
            problem = f"{len(body.continuations)} of them, at most {self._settings.max_prompts} are allowed"
            raise bad_field("continuations", problem)
        scored = await self._scored(body)
        wanted = AnswersWanted(PROMPT_ALONE, [self._prompt(one, index) for index, one in enumerate(scored)])
        finished = await self._generation.collect(wanted, received.time_s, prompt_param="continuations")
        answer_id = f"{AnswerKind.SCORE}{wanted.request_id.hex()}"
        answer = {
            "id": answer_id,
            "object": "list",
            "created": int(time.time()),
            "model": self._model.name,
            "data": [
                _item(index, one, deltas)
                for index, (one, deltas) in enumerate(zip(scored, finished.answers, strict=True))
            ],
            "usage": prompt_usage(finished),
        }
        return json_answer(answer, answer_headers(answer_id, ignored))

    async def _scored(self, body: ScoreBody) -> list[_Scored]:
        adds = body.add_special_tokens is not False
        places = [f"continuations[{index}]" for index in range(len(body.continuations))]
        if isinstance(body.prompt, str):
            ids: Sequence[int] = await self._prompts.text_ids(body.prompt, "prompt", add_special_tokens=adds)
            if not ids:
                raise bad_field("prompt", "has no tokens")
            found = []
            for place, text in zip(places, body.continuations, strict=True):
                if not isinstance(text, str):
                    raise bad_field(place, "must be a text, as the prompt is")
                whole = await self._prompts.text_ids(body.prompt + text, place, add_special_tokens=adds)
                found.append(_Scored(whole, start_of(ids, whole, place)))
            return found
        check_token_ids(body.prompt, self._model, "prompt")
        found = []
        for place, item in zip(places, body.continuations, strict=True):
            if isinstance(item, str):
                raise bad_field(place, "must be a list of token ids, as the prompt is")
            check_token_ids(item, self._model, place)
            found.append(_Scored([*body.prompt, *item], len(body.prompt)))
        return found

    def _prompt(self, scored: _Scored, index: int) -> Prompt:
        place = f"continuations[{index}]"
        fitting = self._prompts.fitting(scored.token_ids, 0, place)
        return Prompt(fitting.token_ids, 0, asks=PromptParams(num_logprobs=0, logprobs_from=scored.start))


def start_of(prompt: Sequence[int], whole: Sequence[int], place: str) -> int:
    """Where the continuation begins in the ids of prompt and continuation written as one text.

    Args:
        prompt: Its ids alone, at least one.
        whole: The ids of both.
        place: The continuation, for errors.

    Raises:
        ApiError: 400: its border with the prompt leaves no token before it, or none of it.
    """
    start = shared_length(prompt, whole)
    if not start:
        problem = "written behind the prompt it changes the prompt's first token, so nothing stands before it"
        raise bad_field(place, f"{problem}: use a longer prompt, or token ids")
    if start == len(whole):
        problem = "written behind the prompt it adds no token to the prompt's, so there is nothing to score"
        raise bad_field(place, f"{problem}: use a longer text, or token ids")
    return start


def shared_length(prompt: Sequence[int], whole: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next(
        (index for index, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other),
        min(len(prompt), len(whole)),
    )


def _item(index: int, scored: _Scored, deltas: Sequence[AnswerDelta]) -> dict[str, object]:
    token_ids = scored.token_ids[scored.start :]
    logprobs = _last([token for delta in deltas for token in delta.prompt_logprobs], len(token_ids))
    return {
        "object": "score",
        "index": index,
        "score": sum(logprobs),
        "token_ids": list(token_ids),
        "token_logprobs": logprobs,
    }


def _last(tokens: Sequence[TokenLogprobs], count: int) -> list[float]:
    if len(tokens) < count:
        raise internal_error()
    values = [token.logprob for token in tokens[len(tokens) - count :]]
    return [FLOOR if value is None else max(value, FLOOR) for value in values]
