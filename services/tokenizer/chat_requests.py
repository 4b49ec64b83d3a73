"""Tokenizer process: the fields of a chat to the answers that it wants, whichever API they came in.

    fields -> names, types, ranges -> prompt -> `UnderstoodChat`: what `generation` needs, less the format

The chat route reads the fields from its body; others write a chat in these fields first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.runtime.config import Settings
from services.tokenizer.answer_parts import ParserFactory
from services.tokenizer.generation import Generation
from services.tokenizer.openai_schema import ChatBody, Ignored, parse_chat
from services.tokenizer.prompts import PromptMaker
from services.tokenizer.submission import AnswersWanted


@dataclass(frozen=True)
class UnderstoodChat:
    """A chat that was checked and encoded.

    Attributes:
        body: Its fields.
        wanted: The answers.
        ignored: What of its fields does nothing.
        parsers: Makes the parser of each answer; None gives texts as they are.
    """

    body: ChatBody
    wanted: AnswersWanted
    ignored: Ignored
    parsers: ParserFactory | None = None


class ChatRequests:
    """Understands the chats of one process."""

    def __init__(self, settings: Settings, prompts: PromptMaker, generation: Generation) -> None:
        self._settings = settings
        self._prompts = prompts
        self._generation = generation

    async def understand(self, fields: Mapping[str, object]) -> UnderstoodChat:
        """Checks and encodes a chat.

        Raises:
            ApiError: 400 naming the field, 404 for another model, 503 when too many long texts wait.
        """
        body, ignored = parse_chat(fields, self._settings)
        self._generation.check_against_model(body)
        prompt = await self._prompts.chat(body)
        ignored = ignored.with_dropped(await self._prompts.dropped_keys(body), self._settings)
        return UnderstoodChat(body, AnswersWanted(body, [prompt]), ignored)

    async def token_ids(self, fields: Mapping[str, object]) -> list[int]:
        """The prompt of a chat, whether it fits or not.

        Raises:
            ApiError: as `understand`.
        """
        body, _ = parse_chat(fields, self._settings)
        self._generation.check_against_model(body)
        return await self._prompts.chat_ids(body)
