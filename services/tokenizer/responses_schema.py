"""Tokenizer process: the body of POST /v1/responses (OpenAI's Responses), field by field.

Stateless: what would need an earlier response kept (`previous_response_id`, `conversation`, `background`, `prompt`) is
refused by name; `store` changes no token and is taken. What the fields mean as a chat is `responses_chat`'s. Owns
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from services.runtime.config import Settings
from services.tokenizer.request_body import BodyForm, Ignored

_INT32 = 2**31 - 1
Status: TypeAlias = Annotated[str | None, Meta(description="Without effect.")]
ItemId: TypeAlias = Annotated[str | None, Meta(description="Without effect.")]
MetadataKey: TypeAlias = Annotated[str, Meta(max_length=64)]
MetadataValue: TypeAlias = Annotated[str, Meta(max_length=512)]
Metadata: TypeAlias = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16, description="Told back.")]
Name: TypeAlias = Annotated[str, Meta(min_length=1)]


class InputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """Text of the user's."""

    text: str


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of an earlier answer."""

    text: str
    annotations: Annotated[list[dict[str, Any]] | None, Meta(description="Without effect.")] = None
    logprobs: Annotated[list[dict[str, Any]] | None, Meta(description="Without effect.")] = None


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """What an earlier answer refused with."""

    refusal: str


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """What the model thought, in short."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A turn. Its `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]
    id: ItemId = None
    status: Status = None
    phase: Annotated[str | None, Meta(description="Without effect.")] = None


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model made."""

    call_id: str
    name: Name
    arguments: str
    id: ItemId = None
    status: Status = None


class FunctionOutputItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    """What a call gave."""

    call_id: str
    output: str | list[InputText]
    id: ItemId = None
    status: Status = None


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before it went on; its summary where there is no content."""

    content: list[ReasoningText] | None = None
    summary: list[SummaryText] | None = None
    encrypted_content: Annotated[str | None, Meta(description="Without effect: nothing is encrypted here.")] = None
    id: ItemId = None
    status: Status = None


Item: TypeAlias = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function that must be called."""

    type: Literal["function"]
    name: Name


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer; `name`, `schema` and `strict` belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of the answer is like."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How much the model thinks; its thoughts come whole, never as a summary."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream is told; its usage always comes with its last event."""

    include_obfuscation: Annotated[bool | None, Meta(description="Without effect.")] = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses. Ranges of what a chat knows too are those of a chat."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=_INT32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Without effect on any token.")] = None
    include: Annotated[
        list[Literal["reasoning.encrypted_content"]] | None,
        Meta(description="Without effect: thoughts come as text, and are understood when sent back."),
    ] = None
    truncation: Literal["disabled"] | None = None
    metadata: Metadata | None = None


_UNBUILT = {
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "context_management": ([],),
    "moderation": (),
}
_WITHOUT_EFFECT = frozenset(
    {
        "store", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options",
    }
)  # fmt: skip
RESPONSES_FORM = BodyForm(ResponsesBody, _UNBUILT, _WITHOUT_EFFECT)


def parse_responses(fields: Mapping[str, object], settings: Settings) -> tuple[ResponsesBody, Ignored]:
    """A body; items without a type that have a role are messages.

    Raises:
        ApiError: 400 naming the field.
    """
    items = fields.get("input")
    if isinstance(items, list):
        fields = {**fields, "input": [_typed(item) for item in items]}
    return RESPONSES_FORM.parse(fields, settings)


def _typed(item: object) -> object:
    if isinstance(item, dict) and item.get("type") is None and "role" in item:
        return {**item, "type": "message"}
    return item
