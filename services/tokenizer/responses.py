"""Tokenizer process: POST /v1/responses, OpenAI's newer route to a chat. Nothing of a response is kept.

body -> checked -> a chat's fields -> `chat_requests` -> `generation`, with errors told in this API's words
"""

from __future__ import annotations

import time

from aiohttp import web

from services.runtime.config import Settings
from services.tokenizer.answer_ids import AnswerKind
from services.tokenizer.api_error import ApiError
from services.tokenizer.chat_requests import ChatRequests
from services.tokenizer.generation import Generation, GenerationCall
from services.tokenizer.json_answer import answer_headers
from services.tokenizer.request_limits import ServedModel
from services.tokenizer.responses_chat import chat_of
from services.tokenizer.responses_format import ResponsesFormat
from services.tokenizer.responses_schema import parse_responses


class Responses:
    """The route of OpenAI's Responses."""

    def __init__(self, settings: Settings, model: ServedModel, chats: ChatRequests, generation: Generation) -> None:
        self._settings = settings
        self._model = model
        self._chats = chats
        self._generation = generation

    async def create(self, request: web.BaseRequest) -> web.StreamResponse:
        """A response.

        Raises:
            ApiError: it is refused, or fails before its first byte.
        """
        received = await self._generation.receive(request)
        body, ignored = parse_responses(received.fields, self._settings)
        words = chat_of(body)
        try:
            chat = await self._chats.understand(words.fields)
            answer_id = f"{AnswerKind.RESPONSE}{chat.wanted.request_id.hex()}"
            return await self._generation.answer(
                GenerationCall(
                    received=received,
                    wanted=words.in_clients_names(chat.wanted),
                    format=ResponsesFormat(answer_id, int(time.time()), self._model.name, body),
                    is_streamed=bool(body.stream),
                    headers=answer_headers(
                        answer_id, ignored.with_dropped(words.clients_names(chat.ignored.names), self._settings)
                    ),
                    parsers=chat.parsers,
                    prompt_param="messages",
                )
            )
        except ApiError as error:
            raise words.in_clients_words(error) from None
