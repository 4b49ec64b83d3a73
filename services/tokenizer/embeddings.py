"""Tokenizer process: POST /v1/embeddings: the pooled hidden state of each input, in OpenAI's form.

`pooling` last (the default) or mean; of length 1 unless `normalize` is false. Inputs are raw prompts, as texts or ids.
"""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Meta

from services.runtime.config import Settings
from services.tokenizer.answer_ids import AnswerKind
from services.tokenizer.api_error import Code, bad_field, internal_error
from services.tokenizer.generation import FinishedAnswers, Generation
from services.tokenizer.json_answer import answer_headers, json_answer
from services.tokenizer.prompts import PromptMaker
from services.tokenizer.raw_inputs import RawInput, inputs_of
from services.tokenizer.request_body import BodyForm
from services.tokenizer.request_limits import ServedModel
from services.tokenizer.sampling_body import SamplingBody
from services.tokenizer.submission import AnswersWanted, Prompt
from services.wire.request_params import PromptParams, Task

PROMPT_ALONE = SamplingBody(temperature=0.0, seed=0)
"""How nothing is drawn: the prompt is computed and that is all."""


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    input: RawInput
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, description="Must be what the model has.")] | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None


EMBEDDINGS_FORM = BodyForm(
    EmbeddingsBody,
    {"truncate_prompt_tokens": (), "messages": (), "priority": (0,), "embed_dtype": ("float32",)},
    frozenset({"user", "request_id", "rid"}),
)


class Embeddings:
    """The route of embeddings."""

    def __init__(self, settings: Settings, model: ServedModel, prompts: PromptMaker, generation: Generation) -> None:
        self._settings = settings
        self._model = model
        self._prompts = prompts
        self._generation = generation

    async def create(self, request: web.BaseRequest) -> web.StreamResponse:
        """The embedding of each input.

        Raises:
            ApiError: it is refused, or fails.
        """
        received = await self._generation.receive(request)
        body, ignored = EMBEDDINGS_FORM.parse(received.fields, self._settings)
        self._generation.check_model(body.model)
        if body.dimensions not in (None, self._model.embedding_size):
            problem = f"this model's embeddings have {self._model.embedding_size}"
            raise bad_field("dimensions", problem, Code.UNSUPPORTED_VALUE)
        wanted = AnswersWanted(PROMPT_ALONE, await self._encoded(body))
        finished = await self._generation.collect(wanted, received.time_s, prompt_param="input")
        answer = {
            "object": "list",
            "data": _items(body, finished),
            "model": self._model.name,
            "usage": prompt_usage(finished),
        }
        return json_answer(answer, answer_headers(f"{AnswerKind.EMBEDDING}{wanted.request_id.hex()}", ignored))

    async def _encoded(self, body: EmbeddingsBody) -> list[Prompt]:
        items = inputs_of(body.input, "input")
        if len(items) > self._settings.max_prompts:
            raise bad_field("input", f"{len(items)} inputs, at most {self._settings.max_prompts} are allowed")
        task = Task.EMBED_MEAN if body.pooling == "mean" else Task.EMBED_LAST
        prompts: list[Prompt] = []
        for index, item in enumerate(items):
            param = "input" if len(items) == 1 else f"input[{index}]"
            adds = body.add_special_tokens is not False
            token_ids = await self._prompts.raw_ids(item, param, add_special_tokens=adds)
            fitting = self._prompts.fitting(token_ids, 0, param)
            prompts.append(Prompt(fitting.token_ids, 0, asks=PromptParams(task=task)))
        return prompts


def prompt_usage(finished: FinishedAnswers) -> dict[str, object]:
    """The usage of prompts that were computed and not answered."""
    names = ("prompt_tokens", "total_tokens", "prompt_tokens_details")
    return {name: finished.usage[name] for name in names}


def _items(body: EmbeddingsBody, finished: FinishedAnswers) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for index, end in enumerate(finished.ends):
        values = pooled(end.embedding, normalize=body.normalize is not False)
        embedding: object = values.tolist()
        if body.encoding_format == "base64":
            embedding = base64.b64encode(values.tobytes()).decode()
        found.append({"object": "embedding", "index": index, "embedding": embedding})
    return found


def pooled(embedding: bytes, *, normalize: bool) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A hidden state as the worker sent it, `[hidden] float32`, of length 1 if so wished.

    Raises:
        ApiError: 500: the answer ended without one.
    """
    values = np.frombuffer(embedding, dtype="<f4")
    if not len(values):
        raise internal_error()
    length = float(np.linalg.norm(values.astype(np.float64)))
    return (values / length).astype("<f4") if normalize and length > 0 else values
