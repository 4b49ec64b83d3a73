"""Turns text and conversations into token ids without ever blocking the event loop.

Short texts are encoded where they come (they must not wait behind megabytes), longer ones in a small pool through
`encode_batch_fast`, which gives up the GIL while it works. The library's own threads are switched off: how many cores
encoding may take is this pool's size.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from services.model_files.tokenizer import LoadedTokenizer
from services.runtime.config import set_library_variable
from services.tokenizer.chat_template import ChatTemplate, TemplateChoices
from services.tokenizer.control_tokens import PRIVATE_NAME_LENGTH, ControlTokens
from services.tokenizer.conversation import Conversation, check_text
from services.tokenizer.dialect import DialectNames
from services.tokenizer.prompt_errors import EncoderBusyError, EncodingFailedError, InvalidTextError, TextTooLongError
from services.tokenizer.template_sandbox import RenderLimits
from services.tokenizer.token_texts import TokenTexts

_Result = TypeVar("_Result")

# About a millisecond of encoding.
_SHORT_CHARACTERS = 2_048


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """How much a `TextEncoder` takes.

    Attributes:
        max_tokens: The model's context; a text with more bytes than this many longest tokens is refused unencoded.
        num_threads: Long texts encoded at once.
        max_waiting: Long texts waiting or being encoded; more are refused with `EncoderBusyError`.
        chat_template: A template file of the operator's, in place of the model's.
        dialect_names: How the model writes calls and thoughts, as the operator says.
    """

    max_tokens: int
    num_threads: int = 2
    max_waiting: int = 256
    chat_template: Path | None = None
    dialect_names: DialectNames = field(default_factory=DialectNames)


class TextEncoder:
    """Encodes prompts; used from one event loop. `close` it at the end."""

    def __init__(self, loaded: LoadedTokenizer, settings: EncoderSettings) -> None:
        """Prepare the protected tokenizer and the chat template.

        Raises:
            ModelFileError: the chat template has a syntax error or its file cannot be read.
        """
        set_library_variable("TOKENIZERS_PARALLELISM", "false")  # read at each call
        self._tokenizer = loaded.tokenizer
        self.texts = TokenTexts(loaded.vocabulary)
        """The way back, token by token."""
        self._max_bytes = settings.max_tokens * loaded.max_token_bytes
        self._settings = settings
        self._control = ControlTokens(loaded)
        limits = RenderLimits(self._max_bytes + PRIVATE_NAME_LENGTH * settings.max_tokens)
        choices = TemplateChoices(settings.chat_template, settings.dialect_names)
        self.template = ChatTemplate(loaded, self._control, limits, choices)
        self._pool = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="encode")
        self._num_waiting = 0
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Long texts that wait or are being encoded."""
        return self._num_waiting

    async def encode(self, text: str, *, parse_special: bool = True, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a raw prompt; [] for "" if the model adds no BOS.

        Args:
            text: The prompt.
            parse_special: Whether the spelling of a control token in the text becomes that token (raw prompts) or plain
                text (what must not command the model).
            add_special_tokens: Whether BOS and EOS go around it as the model wants them.

        Raises:
            TextTooLongError: it cannot fit the context; not encoded.
            InvalidTextError: it holds half of a surrogate pair.
            EncoderBusyError: too many long texts are waiting.
            EncodingFailedError: the library broke down on this text.
        """
        if len(text) > self._max_bytes:
            raise self._too_long(len(text), "characters")
        tokenizer = self._tokenizer if parse_special else self._control.tokenizer

        def work() -> list[int]:
            check_text(text)
            num_bytes = len(text.encode("utf-8"))
            if num_bytes > self._max_bytes:
                raise self._too_long(num_bytes, "bytes")
            if not parse_special and self._control.holds_private_name(text):
                raise InvalidTextError("the text holds reserved private-use characters")
            return _encode(tokenizer, text, add_special_tokens)

        return await self._run(work, is_short=len(text) <= _SHORT_CHARACTERS)

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """Return the ids of a conversation, rendered through the chat template; BOS only where the template puts it.

        Raises:
            PromptError: any of its kinds: see `ChatTemplate.render`, and `TextTooLongError`.
            EncoderBusyError: too many long texts are waiting.
        """

        def work() -> list[int]:
            rendered = self.template.render(conversation)
            num_bytes = self._control.num_text_bytes(rendered)
            if num_bytes > self._max_bytes:
                raise self._too_long(num_bytes, "bytes", conversation.longest_field)
            return _encode(self._control.tokenizer, rendered, add_special_tokens=False)

        return await self._run(work, is_short=conversation.is_short(_SHORT_CHARACTERS))

    async def dropped_keys(self, conversation: Conversation) -> list[str]:
        """Return the keys that the template leaves out: see `ChatTemplate.dropped_keys`. Costs a second rendering.

        Raises:
            PromptError: as `encode_chat`.
            EncoderBusyError: too many long texts are waiting.
        """
        if not conversation.has_optional_keys:
            return []
        return await self._run(
            lambda: self.template.dropped_keys(conversation), conversation.is_short(_SHORT_CHARACTERS)
        )

    async def render_chat(self, conversation: Conversation) -> str:
        """Return the text that `encode_chat` encodes, control tokens spelled out, for people to read.

        Raises:
            PromptError: as `encode_chat`.
            EncoderBusyError: too many long texts are waiting.
        """

        def work() -> str:
            return self._control.reveal(self.template.render(conversation))

        return await self._run(work, is_short=conversation.is_short(_SHORT_CHARACTERS))

    def close(self) -> None:
        """Drop what waits and end the threads; a text being encoded is finished first."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _run(self, work: Callable[[], _Result], is_short: bool) -> _Result:
        if is_short:
            return work()
        if self._num_waiting >= self._settings.max_waiting:
            raise EncoderBusyError(f"{self._num_waiting} long texts are waiting to be encoded")
        with self._lock:
            self._num_waiting += 1
        future = self._pool.submit(work)
        # A client that leaves takes its text out of the queue; one being encoded counts until its thread is done.
        future.add_done_callback(self._leave)
        return await asyncio.wrap_future(future)

    def _leave(self, _: Future[_Result]) -> None:
        with self._lock:  # called on a pool thread
            self._num_waiting -= 1

    def _too_long(self, count: int, unit: str, param: str | None = None) -> TextTooLongError:
        return TextTooLongError(
            f"the text has {count} {unit}; the context of {self._settings.max_tokens} tokens cannot hold more than"
            f" {self._max_bytes} bytes",
            param,
        )


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the library's Rust code is no Exception and must not end a task
        raise EncodingFailedError(f"the tokenizer failed on a text of {len(text)} characters: {error}") from error
    return ids
