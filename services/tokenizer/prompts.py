"""Tokenizer process: checked requests to encoded prompts that fit.

Encoding itself, off the event loop where it is long, is `text_encoder`'s; what it finds wrong becomes an error that
names the request's field.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TypeVar

from services.tokenizer.api_error import ApiError, Code, bad_field, unavailable
from services.tokenizer.backend_view import BackendView
from services.tokenizer.conversation import Conversation
from services.tokenizer.dialect import Dialect
from services.tokenizer.openai_schema import ChatBody, CompletionBody
from services.tokenizer.prompt_errors import (
    EncoderBusyError,
    MissingKeyError,
    NoChatTemplateError,
    PromptError,
    TextTooLongError,
)
from services.tokenizer.request_limits import (
    DEFAULT_COMPLETION_TOKENS,
    ServedModel,
    answer_limit,
    check_token_ids,
    truncated,
)
from services.tokenizer.sampling_body import SamplingBody
from services.tokenizer.submission import Prompt
from services.tokenizer.text_encoder import TextEncoder
from services.wire.request_params import PromptParams

_Result = TypeVar("_Result")


class PromptMaker:
    """Makes prompts for one model."""

    def __init__(self, model: ServedModel, encoder: TextEncoder, view: BackendView) -> None:
        self._model = model
        self._encoder = encoder
        self._view = view
        self.texts = encoder.texts
        """The way back, token by token."""

    @property
    def dialect(self) -> Dialect:
        """How the model writes calls and thoughts."""
        return self._encoder.template.dialect

    async def chat(self, body: ChatBody, conversation: Conversation) -> Prompt:
        """The prompt of a conversation; without a limit the answer may run to the end of the context.

        Raises:
            ApiError: 400 naming the field, 503 when too many long texts wait.
        """
        token_ids = await self.chat_ids(conversation)
        try:
            return self._prompt(body, token_ids, body.wanted_tokens, "messages")
        except ApiError as error:
            if error.code == Code.CONTEXT_LENGTH_EXCEEDED:
                error.param = conversation.longest_field
            raise

    async def chat_ids(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation, whether they fit or not.

        Raises:
            ApiError: 400 naming the field, 503 when too many long texts wait.
        """
        return await _blamed_on("messages", self._encoder.encode_chat(conversation))

    async def chat_text(self, conversation: Conversation) -> str:
        """The text of which `chat_ids` are the ids, control tokens spelled out, for people to read.

        Raises:
            ApiError: as `chat_ids`.
        """
        return await _blamed_on("messages", self._encoder.render_chat(conversation))

    async def text_ids(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a raw prompt, whether they fit or not.

        Raises:
            ApiError: 400 naming the field, 503 when too many long texts wait.
        """
        return await _blamed_on(param, self._encoder.encode(text, add_special_tokens=add_special_tokens))

    async def raw_ids(self, item: str | Sequence[int], param: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """The ids of a raw prompt that may be given as ids already, whether they fit or not.

        Raises:
            ApiError: 400 naming the field, 503 when too many long texts wait.
        """
        if not isinstance(item, str):
            check_token_ids(item, self._model, param)
            return item
        token_ids = await self.text_ids(item, param, add_special_tokens=add_special_tokens)
        await asyncio.sleep(0)  # a thousand short texts are encoded on the loop: others get their turn
        return token_ids

    async def dropped_keys(self, conversation: Conversation) -> list[str]:
        """What of a conversation that could be encoded the template did not show: places such as `messages[].NAME`.

        Raises:
            ApiError: 503 when too many long texts wait.
        """
        return await _blamed_on("messages", self._encoder.dropped_keys(conversation))

    async def completions(self, body: CompletionBody) -> list[Prompt]:
        """The prompts of a completion request, in the order given.

        Raises:
            ApiError: 400 naming the field, 503 when too many long texts wait.
        """
        wanted = DEFAULT_COMPLETION_TOKENS if body.wanted_tokens is None else body.wanted_tokens
        items = body.prompts
        prompts: list[Prompt] = []
        for index, item in enumerate(items):
            param = "prompt" if len(items) == 1 else f"prompt[{index}]"
            token_ids = await self.raw_ids(item, param, add_special_tokens=body.add_special_tokens is not False)
            prompts.append(self._prompt(body, token_ids, wanted, param, item if isinstance(item, str) else ""))
        return prompts

    def fitting(self, token_ids: Sequence[int], wanted: int | None, param: str, echo: str = "") -> Prompt:
        """A prompt of these ids, with as much room behind it as is wanted and there.

        Raises:
            ApiError: 400 naming the field: no ids, or too many.
        """
        if not token_ids:
            raise bad_field(param, "has no tokens")
        limit = answer_limit(len(token_ids), wanted, self._view.max_total_tokens, self._model, param)
        return Prompt(token_ids, limit, echo)

    def _prompt(
        self, body: SamplingBody, token_ids: Sequence[int], wanted: int | None, param: str, text: str = ""
    ) -> Prompt:
        """A prompt and what is wanted of it; `text` is what it was encoded from, "" for ids."""
        kept = truncated(token_ids, body, self._view.max_total_tokens, self._model)
        echo = ""
        if body.has_echo:
            echo = text if text and len(kept) == len(token_ids) else self.texts.decode(kept)
        return replace(
            self.fitting(kept, wanted, param, echo), asks=PromptParams(num_logprobs=body.num_prompt_logprobs)
        )


async def _blamed_on(param: str, encoding: Awaitable[_Result]) -> _Result:
    """Awaits an encoding; its errors name the field at fault, `param` when they do not know better."""
    try:
        return await encoding
    except EncoderBusyError as error:
        raise unavailable(Code.OVERLOADED, str(error)) from None
    except TextTooLongError as error:
        raise ApiError(400, error.message, code=Code.CONTEXT_LENGTH_EXCEEDED, param=error.param or param) from None
    except NoChatTemplateError as error:
        raise ApiError(400, error.message, code=Code.NO_CHAT_TEMPLATE, param=error.param) from None
    except MissingKeyError as error:
        raise bad_field(error.param or param, error.message, Code.MISSING_FIELD) from None
    except PromptError as error:
        raise bad_field(error.param or param, error.message) from None
