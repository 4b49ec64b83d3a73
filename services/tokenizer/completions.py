"""Tokenizer process: the routes of OpenAI's two kinds of completions: a checked request to the answers that it wants.

refuse by load -> body -> names, types -> encode -> `generation`
"""

from __future__ import annotations

import time

from aiohttp import web

from services.runtime.config import Settings
from services.tokenizer.answer_ids import AnswerKind
from services.tokenizer.chat_format import ChatFormat
from services.tokenizer.chat_requests import ChatRequests
from services.tokenizer.chat_words import CHAT_WORDS, LEGACY_CHAT_WORDS
from services.tokenizer.completion_format import CompletionFormat
from services.tokenizer.generation import Generation, GenerationCall
from services.tokenizer.json_answer import answer_headers
from services.tokenizer.logprob_forms import display_of
from services.tokenizer.openai_chunks import AnswerHead
from services.tokenizer.openai_schema import parse_completion
from services.tokenizer.prompts import PromptMaker
from services.tokenizer.request_limits import ServedModel
from services.tokenizer.request_names import names_in
from services.tokenizer.submission import AnswersWanted


class Completions:
    """POST /v1/chat/completions and /v1/completions."""

    def __init__(
        self, settings: Settings, model: ServedModel, prompts: PromptMaker, chats: ChatRequests, generation: Generation
    ) -> None:
        self._settings = settings
        self._model = model
        self._prompts = prompts
        self._texts = prompts.texts
        self._chats = chats
        self._generation = generation

    async def chat(self, request: web.BaseRequest) -> web.StreamResponse:
        """A chat completion.

        Raises:
            ApiError: it is refused, or fails before its first byte.
        """
        received = await self._generation.receive(request)
        chat = await self._chats.understand(received.fields)
        head = self._head(AnswerKind.CHAT, chat.wanted)
        words = LEGACY_CHAT_WORDS if chat.has_legacy_calls else CHAT_WORDS
        return await self._generation.answer(
            GenerationCall(
                received=received,
                wanted=chat.wanted,
                format=ChatFormat(head, chat.wanted.num_answers, words, display_of(chat.wanted, self._texts)),
                is_streamed=bool(chat.body.stream),
                headers=answer_headers(head.answer_id, chat.ignored),
                parsers=chat.parsers,
                prompt_param="messages",
                names=names_in(received.fields),
            )
        )

    async def completion(self, request: web.BaseRequest) -> web.StreamResponse:
        """A text completion.

        Raises:
            ApiError: it is refused, or fails before its first byte.
        """
        received = await self._generation.receive(request)
        body, ignored = parse_completion(received.fields, self._settings)
        self._generation.check_against_model(body)
        grammar = body.grammar(self._settings)
        prompts = await self._prompts.completions(body)
        wanted = AnswersWanted(body, prompts, grammar=grammar, grammar_param=body.grammar_param)
        head = self._head(AnswerKind.COMPLETION, wanted)
        return await self._generation.answer(
            GenerationCall(
                received=received,
                wanted=wanted,
                format=CompletionFormat(head, wanted.num_answers, display_of(wanted, self._texts)),
                is_streamed=bool(body.stream),
                headers=answer_headers(head.answer_id, ignored),
                names=names_in(received.fields),
            )
        )

    def _head(self, kind: AnswerKind, wanted: AnswersWanted) -> AnswerHead:
        answer_id = f"{kind}{wanted.request_id.hex()}"
        has_usage_chunk = wanted.body.wants_usage_chunk
        return AnswerHead(answer_id, int(time.time()), self._model.name, has_usage_chunk, self._model.fingerprint)
