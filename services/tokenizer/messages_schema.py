"""Tokenizer process: the body of POST /v1/messages (Anthropic's Messages) and what it means as a chat.

    system, messages of blocks --> system | user | assistant (text, thoughts, calls) | tool messages of a chat
                                   each with the place that it came from, for errors

Nothing is rendered or checked against a model here: the chat that comes out goes the way of every chat. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.tokenizer.chat_fields import ChatFields, ClientWords
from services.tokenizer.field_tables import Neutral
from services.tokenizer.request_body import BodyForm

_INT32 = 2**31 - 1
TokenCount = Annotated[int, Meta(ge=1, le=_INT32)]


class CacheControl(msgspec.Struct, frozen=True, kw_only=True):
    """Without effect: prefixes are cached by themselves."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class Block(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A part of a message."""

    cache_control: CacheControl | None = None


class TextBlock(Block, frozen=True, kw_only=True, tag="text"):
    """Text."""

    text: str
    citations: Annotated[list[dict[str, Any]] | None, Meta(description="Without effect.")] = None


class ToolUseBlock(Block, frozen=True, kw_only=True, tag="tool_use"):
    """A call that the model made."""

    id: str
    name: Annotated[str, Meta(min_length=1)]
    input: dict[str, Any]


class ToolResultBlock(Block, frozen=True, kw_only=True, tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: Annotated[bool | None, Meta(description='The text is shown behind "Error: ".')] = None


class ThinkingBlock(Block, frozen=True, kw_only=True, tag="thinking"):
    """What the model thought before it answered."""

    thinking: str
    signature: Annotated[str | None, Meta(description="Without effect.")] = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and what the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model thinks aloud, where its chat template has a switch for that."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=_INT32)] | None, Meta(description="Without effect: max_tokens bounds it all.")
    ] = None
    display: Annotated[str | None, Meta(description="Without effect.")] = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: what the prompt is made of."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[
        OutputFormat | None, Meta(description="The older spelling of `format` in `output_config`.")
    ] = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    """POST /v1/messages. Ranges of what a chat knows too are checked as the chat's."""

    max_tokens: TokenCount
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    stop_sequences: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=16)] | None = None
    stream: bool | None = None


_UNBUILT: Mapping[str, Neutral] = {
    "mcp_servers": ([],),
    "container": (),
    "context_management": (),
    "betas": ([],),
    "speed": ("standard",),
}
_WITHOUT_EFFECT = frozenset(
    {
        "metadata", "service_tier", "inference_geo", "cache_control", "diagnostics", "user_profile_id", "workspace_id",
    }
)  # fmt: skip
_WORDS = ClientWords(
    renamed={".function.parameters": ".input_schema", ".function": ""},
    not_shown={
        "messages[].reasoning_content": "messages[].content[thinking]",
        "messages[].tool_calls": "messages[].content[tool_use]",
        "messages[tool].content": "messages[].content[tool_result]",
    },
)
COUNT_FORM = BodyForm(CountTokensBody, _UNBUILT, _WITHOUT_EFFECT)
MESSAGES_FORM = BodyForm(MessagesBody, _UNBUILT, _WITHOUT_EFFECT)


def chat_of(body: CountTokensBody) -> ChatFields:
    """The chat that a body of messages means, and where each field of it came from."""
    chat = ChatFields({"model": body.model, "stream": False}, _WORDS)
    if body.system is not None:
        chat.add_message({"role": "system", "content": _joined(body.system)}, "system")
    for index, message in enumerate(body.messages):
        place = f"messages[{index}]"
        if message.role == "assistant":
            chat.add_message(_assistant(message), place)
        else:
            _add_user(message, place, chat)
    _add_tools(body, chat)
    _add_format(body, chat)
    if body.messages[-1].role == "assistant":  # the answer goes on where the client's beginning of it ends
        chat.set("continue_final_message", True, f"messages[{len(body.messages) - 1}]")
        chat.set("add_generation_prompt", False, "messages")
    if isinstance(body, MessagesBody):
        chat.set("max_tokens", body.max_tokens, "max_tokens")
        chat.set("stop", body.stop_sequences, "stop_sequences")
        for name in ("temperature", "top_p", "top_k", "stream"):
            chat.set(name, getattr(body, name), name)
    return chat


def _joined(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


def _assistant(message: Message) -> dict[str, object]:
    """An earlier answer: its texts, thoughts and calls each in their place of a chat's message."""
    blocks = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
    turn: dict[str, object] = {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
    }
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if thoughts:
        turn["reasoning_content"] = thoughts
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call(block: ToolUseBlock) -> dict[str, object]:
    arguments = msgspec.json.encode(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _add_user(message: Message, place: str, chat: ChatFields) -> None:
    """A user's turn, or the system's: each result of a call is a message of its own, texts between stay together."""
    if isinstance(message.content, str):
        chat.add_message({"role": message.role, "content": message.content}, place)
        return
    texts: list[str] = []
    for index, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock) and message.role == "user":
            _flush(texts, message.role, place, chat)
            chat.add_message(_result(block), f"{place}.content[{index}]")
        else:
            chat.refuse(f"{place}.content[{index}].type", f"has no place in a message of role {message.role}")
    if texts or not message.content:
        _flush(texts or [""], message.role, place, chat)


def _flush(texts: list[str], role: str, place: str, chat: ChatFields) -> None:
    if texts:
        chat.add_message({"role": role, "content": "".join(texts)}, place)
        texts.clear()


def _result(block: ToolResultBlock) -> dict[str, object]:
    text = _joined(block.content)
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }


def _add_tools(body: CountTokensBody, chat: ChatFields) -> None:
    if body.tools:
        tools = [_tool(tool) for tool in body.tools]
        chat.set("tools", tools, "tools")
    choice = body.tool_choice
    if choice is None:
        return
    if choice.type == "tool" and not choice.name:
        chat.refuse("tool_choice.name", "is required where the type is tool")
    if choice.type == "tool":
        chat.set("tool_choice", {"type": "function", "function": {"name": choice.name}}, "tool_choice")
    else:
        chat.set("tool_choice", "required" if choice.type == "any" else choice.type, "tool_choice")
    if choice.disable_parallel_tool_use is not None:
        chat.set("parallel_tool_calls", not choice.disable_parallel_tool_use, "tool_choice.disable_parallel_tool_use")


def _tool(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _add_format(body: CountTokensBody, chat: ChatFields) -> None:
    if body.thinking is not None:
        switch = {"enable_thinking": body.thinking.type != "disabled"}
        chat.set("chat_template_kwargs", switch, "thinking")
    config = body.output_config or OutputConfig()
    if config.format is not None and body.output_format is not None:
        chat.refuse("output_format", "cannot go together with output_config.format, whose older spelling it is")
    for place, wanted in (("output_config.format", config.format), ("output_format", body.output_format)):
        if wanted is not None:
            schema = {"name": "answer", "schema": wanted.schema, "strict": True}
            chat.set("response_format", {"type": "json_schema", "json_schema": schema}, place)
    chat.set("reasoning_effort", config.effort, "output_config.effort")
