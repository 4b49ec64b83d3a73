"""Tokenizer process: the fields of a chat to the answers that it wants, whichever API they came in.

    fields -> names, types, ranges -> prompt -> `UnderstoodChat`: what `generation` needs, less the format

The chat route reads the fields from its body; others write a chat in these fields first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.runtime.config import Settings
from services.tokenizer.answer_parts import ParserFactory
from services.tokenizer.answer_plan import AnswerPlanner, conversation_of, unused_switches
from services.tokenizer.conversation import Conversation
from services.tokenizer.generation import Generation
from services.tokenizer.json_schema_check import SchemaLimits
from services.tokenizer.openai_schema import ChatBody, parse_chat
from services.tokenizer.prompts import PromptMaker
from services.tokenizer.request_body import Ignored, ignore
from services.tokenizer.submission import AnswersWanted
from services.tokenizer.tool_requests import ToolUse, tool_use_of


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
    has_legacy_calls: bool = False
    """Whether the client speaks of `functions` and wants its call as `function_call`."""


@dataclass(frozen=True)
class CountedChat:
    """The ids of a chat, and what of its fields does nothing."""

    token_ids: Sequence[int]
    ignored: Ignored


@dataclass(frozen=True)
class RenderedChat(CountedChat):
    """A chat as the model would see it: its text too, with the control tokens spelled out."""

    text: str


@dataclass(frozen=True)
class _CheckedChat:
    """A chat whose fields were checked: nothing is encoded yet."""

    body: ChatBody
    use: ToolUse | None
    conversation: Conversation
    ignored: Ignored


class ChatRequests:
    """Understands the chats of one process."""

    def __init__(
        self, settings: Settings, prompts: PromptMaker, planner: AnswerPlanner, generation: Generation
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._planner = planner
        self._generation = generation

    async def understand(self, fields: Mapping[str, object]) -> UnderstoodChat:
        """Checks and encodes a chat.

        Raises:
            ApiError: 400 naming the field, 404 for another model, 503 when too many long texts wait.
        """
        chat = self._checked(fields)
        body, use = chat.body, chat.use
        structure = body.grammar(self._settings)
        prompt = await self._prompts.chat(body, chat.conversation)
        plan = self._planner.plan(body, use, prompt.token_ids, structure)
        wanted = AnswersWanted(
            body,
            [prompt],
            grammar=plan.grammar,
            grammar_param=_grammar_param(body, use, plan.grammar is structure),
            shows_special_tokens=plan.shows_special_tokens,
        )
        return UnderstoodChat(body, wanted, await self._ignored(chat), plan.parsers, use is not None and use.is_legacy)

    async def count(self, fields: Mapping[str, object]) -> CountedChat:
        """The prompt of a chat, whether it fits or not.

        Raises:
            ApiError: as `understand`.
        """
        chat = self._checked(fields)
        return CountedChat(await self._prompts.chat_ids(chat.conversation), await self._ignored(chat))

    async def render(self, fields: Mapping[str, object]) -> RenderedChat:
        """What the model would see of a chat, whether it fits or not.

        Raises:
            ApiError: as `understand`.
        """
        chat = self._checked(fields)
        token_ids = await self._prompts.chat_ids(chat.conversation)
        text = await self._prompts.chat_text(chat.conversation)
        return RenderedChat(token_ids, await self._ignored(chat), text)

    def _checked(self, fields: Mapping[str, object]) -> _CheckedChat:
        body, ignored = parse_chat(fields, self._settings)
        self._generation.check_against_model(body)
        use = tool_use_of(body, SchemaLimits.of(self._settings))
        if use is not None and use.ignored:
            ignored = ignore([*ignored.names, *use.ignored], self._settings)
        return _CheckedChat(body, use, conversation_of(body, use, self._prompts.dialect), ignored)

    async def _ignored(self, chat: _CheckedChat) -> Ignored:
        """The names that mean nothing, to anyone or to this model's template."""
        dropped = await self._prompts.dropped_keys(chat.conversation)
        return chat.ignored.with_dropped([*dropped, *unused_switches(chat.body, self._prompts.dialect)], self._settings)


def _grammar_param(body: ChatBody, use: ToolUse | None, is_structure: bool) -> str | None:
    """The field that the grammar of a chat came from: a structure alone, or tools, perhaps together with one."""
    if use is None or is_structure:
        return body.grammar_param
    return "functions" if use.is_legacy else "tools"
