"""Tokenizer process: the bodies of OpenAI's chat and text completions, checked field by field.

A body goes through three doors: names, types and ranges (`request_body`), and what one field says about another. Every
error is a 400 that names its field. Owns nothing; knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from services.runtime.config import Settings
from services.tokenizer.api_error import bad_field
from services.tokenizer.field_tables import (
    UNBUILT_IN_CHAT,
    UNBUILT_IN_COMPLETIONS,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_IN_STREAM_OPTIONS,
)
from services.tokenizer.message_fields import unknown_message_keys
from services.tokenizer.raw_inputs import inputs_of
from services.tokenizer.request_body import BodyForm, Ignored, ignore
from services.tokenizer.sampling_body import Count, check_num_logprobs, check_sampling
from services.tokenizer.structured_body import StructuredBody
from services.wire.request_params import NO_LOGPROBS

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(StructuredBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions. What a message holds is checked where it is rendered."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None

    @property
    def num_logprobs(self) -> int:
        """As many as `top_logprobs` says, if `logprobs` asks for any."""
        return (self.top_logprobs or 0) if self.logprobs else NO_LOGPROBS


class CompletionBody(StructuredBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: Count | None = None

    @property
    def num_logprobs(self) -> int:
        """As many as `logprobs` says."""
        return NO_LOGPROBS if self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        """An echo has the same log-probabilities as the answer behind it."""
        asked = super().num_prompt_logprobs
        return max(asked, self.num_logprobs) if self.echo else asked

    @property
    def has_echo(self) -> bool:
        """As `echo` says."""
        return bool(self.echo)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts in the order given: all texts or all ids.

        Raises:
            ApiError: 400: no prompt, an empty one, or a mixture.
        """
        return inputs_of(self.prompt, "prompt")


_WITHOUT_EFFECT = WITHOUT_EFFECT.union(f"stream_options.{name}" for name in WITHOUT_EFFECT_IN_STREAM_OPTIONS)
CHAT_FORM = BodyForm(ChatBody, UNBUILT_IN_CHAT, _WITHOUT_EFFECT)
COMPLETION_FORM = BodyForm(CompletionBody, UNBUILT_IN_COMPLETIONS, _WITHOUT_EFFECT)


def parse_chat(fields: Mapping[str, object], settings: Settings) -> tuple[ChatBody, Ignored]:
    """A chat request.

    Raises:
        ApiError: 400 naming the field.
    """
    body, ignored = CHAT_FORM.parse(fields, settings)
    if len(body.messages) > settings.max_messages:
        raise bad_field("messages", f"{len(body.messages)} messages, at most {settings.max_messages} are allowed")
    names = unknown_message_keys(body.messages)
    check_sampling(body, settings)
    if body.top_logprobs:
        check_num_logprobs(body.top_logprobs, "top_logprobs", settings)
        if not body.logprobs:
            raise bad_field("top_logprobs", "is only for logprobs: true")
    return body, ignore([*ignored.names, *names], settings)


def parse_completion(fields: Mapping[str, object], settings: Settings) -> tuple[CompletionBody, Ignored]:
    """A completion request.

    Raises:
        ApiError: 400 naming the field.
    """
    body, ignored = COMPLETION_FORM.parse(fields, settings)
    num_prompts = len(body.prompts)
    check_sampling(body, settings)
    if body.logprobs:
        check_num_logprobs(body.logprobs, "logprobs", settings)
    if num_prompts * body.num_choices > settings.max_prompts:
        raise bad_field("prompt", f"{num_prompts} prompts with n={body.num_choices}, at most {settings.max_prompts}")
    return body, ignored
