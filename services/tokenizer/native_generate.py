"""Tokenizer process: POST /generate, SGLang's native route.

body -> prompts as texts or ids -> fields that all routes share -> `generation`, with errors told in this API's words
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web
from msgspec.structs import replace

from services.model_files.tokenizer import LoadedTokenizer
from services.runtime.config import Settings
from services.tokenizer.answer_ids import AnswerKind
from services.tokenizer.api_error import ApiError, bad_field
from services.tokenizer.field_tables import UNBUILT_EVERYWHERE
from services.tokenizer.generation import Generation, GenerationCall
from services.tokenizer.json_answer import answer_headers
from services.tokenizer.native_format import NativeAnswers, NativeFormat
from services.tokenizer.native_schema import (
    DEFAULT_NEW_TOKENS,
    GENERATE_FORM,
    GenerateBody,
    in_native_words,
    shared_fields,
)
from services.tokenizer.prompts import PromptMaker
from services.tokenizer.request_body import BodyForm
from services.tokenizer.request_limits import ServedModel
from services.tokenizer.sampling_body import SamplingBody, check_num_logprobs, check_sampling
from services.tokenizer.structured_body import check_beside_grammar
from services.tokenizer.structured_output import FIELDS, StructureLimits, structure_of, structure_param
from services.tokenizer.submission import AnswersWanted, Prompt
from services.wire.request_params import NO_LOGPROBS, Grammar, PromptParams


class NativeSamplingBody(SamplingBody, frozen=True, kw_only=True):
    """The fields that all routes share, with a number of log-probabilities that is the route's own."""

    num_wanted_logprobs: int = NO_LOGPROBS

    @property
    def num_logprobs(self) -> int:
        """As `top_logprobs_num` says, if `return_logprob` asks for any."""
        return self.num_wanted_logprobs

    @property
    def limit_name(self) -> str:
        """This route's own name."""
        return "max_new_tokens"


_SHARED_FORM = BodyForm(NativeSamplingBody, {**UNBUILT_EVERYWHERE, "stream_interval": (1,)})


@dataclass(frozen=True)
class NativeModel:
    """The served model and its tokenizer."""

    served: ServedModel
    loaded: LoadedTokenizer


class NativeGenerate:
    """SGLang's route for answers."""

    def __init__(self, settings: Settings, model: NativeModel, prompts: PromptMaker, generation: Generation) -> None:
        self._settings = settings
        self._model = model
        self._prompts = prompts
        self._generation = generation

    async def create(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers to raw prompts.

        Raises:
            ApiError: it is refused, or fails before its first byte.
        """
        received = await self._generation.receive(request)
        body, ignored = GENERATE_FORM.parse(received.fields, self._settings)
        wanted = await self._wanted(body)
        answers = self._answers(body, wanted)
        try:
            return await self._generation.answer(
                GenerationCall(
                    received=received,
                    wanted=wanted,
                    format=NativeFormat(answers),
                    is_streamed=bool(body.stream),
                    headers=answer_headers(_own_id(wanted), ignored),
                    prompt_param=_prompt_param(body),
                    names=body.rids(len(wanted.prompts)),
                )
            )
        except ApiError as error:
            raise in_native_words(error) from None

    async def _wanted(self, body: GenerateBody) -> AnswersWanted:
        fields = shared_fields(body.sampling)
        structure = {name: fields.pop(name) for name in FIELDS if name in fields}
        try:
            sampling, _ = _SHARED_FORM.parse({**fields, "model": body.model}, self._settings)
            grammar = self._grammar(structure)
            check_sampling(sampling, self._settings)
            check_beside_grammar(sampling, grammar)
            self._generation.check_against_model(sampling)
        except ApiError as error:
            raise in_native_words(error) from None
        if body.wants_logprobs:
            check_num_logprobs(body.num_top, "top_logprobs_num", self._settings)
            sampling = replace(sampling, num_wanted_logprobs=body.num_top)
        sampling = replace(sampling, return_token_ids=True)
        prompts = await self._encoded(body)
        grammar_param = structure_param(structure)
        grammar_param = grammar_param and f"sampling_params.{grammar_param}"
        return AnswersWanted(sampling, prompts, grammar=grammar, grammar_param=grammar_param)

    def _grammar(self, structure: Mapping[str, object]) -> Grammar | None:
        return structure_of(structure, StructureLimits.of(self._settings)) if structure else None

    async def _encoded(self, body: GenerateBody) -> Sequence[Prompt]:
        new_tokens = body.sampling.max_new_tokens
        wanted = DEFAULT_NEW_TOKENS if new_tokens is None else new_tokens
        items = body.prompts
        found: list[Prompt] = []
        for index, item in enumerate(items):
            param = f"{_prompt_param(body)}[{index}]" if body.is_list else _prompt_param(body)
            fitting = self._prompts.fitting(await self._prompts.raw_ids(item, param), wanted, param)
            if body.wants_logprobs and body.logprobs_from >= len(fitting.token_ids):
                problem = f"must be below the prompt's {len(fitting.token_ids)} tokens ({param})"
                raise bad_field("logprob_start_len", problem)
            found.append(asking(fitting, body))
        return found

    def _answers(self, body: GenerateBody, wanted: AnswersWanted) -> NativeAnswers:
        num_choices = wanted.body.num_choices
        rids = body.rids(len(wanted.prompts))
        ids = [name for name in rids for _ in range(num_choices)]
        own = _own_id(wanted)
        return NativeAnswers(
            ids=ids or [own if not index else f"{own}-{index}" for index in range(wanted.num_answers)],
            prompt_lengths=[len(prompt.token_ids) for prompt in wanted.prompts for _ in range(num_choices)],
            is_list=body.is_list or num_choices > 1,
            has_logprobs=body.wants_logprobs,
            prompt_from=body.logprobs_from if body.wants_logprobs else -1,
            vocabulary=self._model.loaded.vocabulary if body.return_text_in_logprobs else None,
        )


def asking(prompt: Prompt, body: GenerateBody) -> Prompt:
    """The prompt, with its log-probabilities asked for if the body does."""
    start = body.logprobs_from
    if not body.wants_logprobs or start < 0:
        return prompt
    asks = PromptParams(num_logprobs=body.num_top, logprobs_from=max(1, start))
    return Prompt(prompt.token_ids, prompt.max_tokens, prompt.text, asks)


def _own_id(wanted: AnswersWanted) -> str:
    return f"{AnswerKind.NATIVE}{wanted.request_id.hex()}"


def _prompt_param(body: GenerateBody) -> str:
    return "text" if body.input_ids is None else "input_ids"
