"""Tokenizer process: POST /tokenize, /detokenize and /v1/chat/completions/render: what the model would see.

Nothing here is refused for its length alone but what cannot be encoded: counting is how one learns that a prompt is too
long. Needs no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from services.model_files.tokenizer import LoadedTokenizer
from services.runtime.config import Settings
from services.tokenizer.api_error import Code, bad_field
from services.tokenizer.chat_requests import ChatRequests, CountedChat
from services.tokenizer.generation import Generation
from services.tokenizer.http_body import read_json_body
from services.tokenizer.json_answer import json_answer
from services.tokenizer.prompts import PromptMaker
from services.tokenizer.request_body import BodyForm, Ignored
from services.tokenizer.request_limits import ServedModel, check_token_ids
from services.tokenizer.sampling_body import TokenId

_CHAT_NAMES = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a raw prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


_WITHOUT_EFFECT = frozenset({"user", "request_id", "rid"})
TOKENIZE_FORM = BodyForm(
    TokenizeBody, {"chat_template": (), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},)}, _WITHOUT_EFFECT
)
DETOKENIZE_FORM = BodyForm(DetokenizeBody, {}, _WITHOUT_EFFECT)


class Tokenization:
    """The routes between text and ids."""

    def __init__(
        self,
        settings: Settings,
        served: tuple[ServedModel, LoadedTokenizer],
        prompts: PromptMaker,
        chats: ChatRequests,
        generation: Generation,
    ) -> None:
        self._settings = settings
        self._model, self._loaded = served
        self._prompts = prompts
        self._chats = chats
        self._generation = generation

    async def tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        """The ids of a text or a chat, and how many there may be.

        Raises:
            ApiError: 400 naming the field, 404 for another model, 503 when too many long texts wait.
        """
        body, ignored = TOKENIZE_FORM.parse(await read_json_body(request, self._settings), self._settings)
        self._generation.check_model(body.model)
        counted = await self._counted(body)
        token_ids = counted.token_ids
        found: dict[str, object] = {
            "count": len(token_ids),
            "max_model_len": self._max_model_len,
            "tokens": token_ids,
            "token_strs": self._token_strings(token_ids) if body.return_token_strs else None,
        }
        return json_answer(found, ignored.with_dropped(counted.ignored.names, self._settings).headers)

    async def detokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        """The text of ids, control tokens spelled out.

        Raises:
            ApiError: 400 naming the field, 404 for another model.
        """
        body, ignored = DETOKENIZE_FORM.parse(await read_json_body(request, self._settings), self._settings)
        self._generation.check_model(body.model)
        check_token_ids(body.tokens, self._model, "tokens")
        if len(body.tokens) > self._model.context_tokens:
            problem = f"{len(body.tokens)} ids, the context is {self._model.context_tokens} tokens"
            raise bad_field("tokens", problem, Code.CONTEXT_LENGTH_EXCEEDED)
        vocabulary = self._loaded.vocabulary
        text = b"".join(map(vocabulary.token_bytes, body.tokens)).decode(errors="replace")
        return json_answer({"prompt": text}, ignored.headers)

    async def render(self, request: web.BaseRequest) -> web.StreamResponse:
        """A chat as the model would see it.

        Raises:
            ApiError: 400 naming the field, 404 for another model, 503 when too many long texts wait.
        """
        rendered = await self._chats.render(await read_json_body(request, self._settings))
        token_ids = rendered.token_ids
        found: dict[str, object] = {
            "text": rendered.text,
            "token_ids": token_ids,
            "token_strs": self._token_strings(token_ids),
            "count": len(token_ids),
            "max_model_len": self._max_model_len,
        }
        return json_answer(found, rendered.ignored.headers)

    @property
    def _max_model_len(self) -> int:
        return self._generation.max_model_len

    async def _counted(self, body: TokenizeBody) -> CountedChat:
        """The ids of a raw text or of a chat."""
        if body.messages is not None and body.prompt is not None:
            raise bad_field("messages", "cannot be given together with prompt")
        if body.messages is not None:
            fields = {name: getattr(body, name) for name in _CHAT_NAMES if getattr(body, name) is not None}
            if body.add_special_tokens:
                raise bad_field("add_special_tokens", "a chat has those that its template puts", Code.UNSUPPORTED_VALUE)
            return await self._chats.count(fields)
        if body.prompt is None:
            raise bad_field("prompt", "is required, or messages", Code.MISSING_FIELD)
        for name in _CHAT_NAMES:
            if getattr(body, name) is not None:
                raise bad_field(name, "is only for messages")
        adds = body.add_special_tokens is not False
        return CountedChat(await self._prompts.text_ids(body.prompt, "prompt", add_special_tokens=adds), Ignored(()))

    def _token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        tokenizer = self._loaded.tokenizer
        return [tokenizer.id_to_token(token_id) or "" for token_id in token_ids]
