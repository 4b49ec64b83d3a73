"""Tokenizer process: POST /v1/messages and /v1/messages/count_tokens, Anthropic's route to a chat.

body -> checked -> a chat's fields -> `chat_requests` -> `generation`, with errors told in this API's words
"""

from __future__ import annotations

from aiohttp import web

from services.runtime.config import Settings
from services.tokenizer.answer_ids import AnswerKind
from services.tokenizer.api_error import ApiError
from services.tokenizer.chat_requests import ChatRequests
from services.tokenizer.generation import Generation, GenerationCall
from services.tokenizer.http_body import read_json_body
from services.tokenizer.json_answer import answer_headers, json_answer
from services.tokenizer.messages_format import MessagesFormat
from services.tokenizer.messages_schema import COUNT_FORM, MESSAGES_FORM, chat_of
from services.tokenizer.request_limits import ServedModel


class Messages:
    """The routes of Anthropic's Messages."""

    def __init__(self, settings: Settings, model: ServedModel, chats: ChatRequests, generation: Generation) -> None:
        self._settings = settings
        self._model = model
        self._chats = chats
        self._generation = generation

    async def create(self, request: web.BaseRequest) -> web.StreamResponse:
        """A message.

        Raises:
            ApiError: it is refused, or fails before its first byte.
        """
        received = await self._generation.receive(request)
        body, ignored = MESSAGES_FORM.parse(received.fields, self._settings)
        words = chat_of(body)
        try:
            chat = await self._chats.understand(words.fields)
            answer_id = f"{AnswerKind.MESSAGE}{chat.wanted.request_id.hex()}"
            num_prompt_tokens = len(chat.wanted.prompts[0].token_ids)
            headers = answer_headers(
                answer_id, ignored.with_dropped(words.clients_names(chat.ignored.names), self._settings)
            )
            return await self._generation.answer(
                GenerationCall(
                    received=received,
                    wanted=words.in_clients_names(chat.wanted),
                    format=MessagesFormat(answer_id, self._model.name, num_prompt_tokens),
                    is_streamed=bool(body.stream),
                    headers=headers,
                    parsers=chat.parsers,
                    prompt_param="messages",
                )
            )
        except ApiError as error:
            raise words.in_clients_words(error) from None

    async def count_tokens(self, request: web.BaseRequest) -> web.StreamResponse:
        """How many tokens the prompt of a message would have, whether it fits or not.

        Raises:
            ApiError: 400 naming the field, 404 for another model.
        """
        body, ignored = COUNT_FORM.parse(await read_json_body(request, self._settings), self._settings)
        words = chat_of(body)
        try:
            counted = await self._chats.count(words.fields)
        except ApiError as error:
            raise words.in_clients_words(error) from None
        told = ignored.with_dropped(words.clients_names(counted.ignored.names), self._settings)
        return json_answer({"input_tokens": len(counted.token_ids)}, told.headers)
