"""Tokenizer process: what a body of /v1/responses means as a chat.

    items    reasoning, message(assistant), function_call, function_call ...  -> one assistant's message
             function_call_output                                             -> a tool's message
             message(user | system | developer)                               -> a message of that role

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.chat_fields import ChatFields, ClientWords
from services.tokenizer.responses_schema import (
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    InputText,
    Item,
    MessageItem,
    NamedFunction,
    OutputText,
    ReasoningItem,
    Refusal,
    ResponsesBody,
    TextFormat,
)

_SAME_NAME = ("temperature", "top_p", "top_k", "seed", "stop", "chat_template_kwargs", "parallel_tool_calls", "stream")
_WORDS = ClientWords(
    renamed={".function": ""},
    not_shown={
        "messages[].reasoning_content": "input[reasoning]",
        "messages[].tool_calls": "input[function_call]",
        "messages[tool].content": "input[function_call_output]",
    },
    prompt="input",
)


def chat_of(body: ResponsesBody) -> ChatFields:
    """The chat that a body means, and where each field of it came from.

    Raises:
        ApiError: 400 naming the field: a format without its schema.
    """
    chat = ChatFields({"model": body.model}, _WORDS)
    if body.instructions is not None:
        chat.add_message({"role": "system", "content": body.instructions}, "instructions")
    if isinstance(body.input, str):
        chat.add_message({"role": "user", "content": body.input}, "input")
    else:
        _Turns(chat).add_all(body.input)
    for name in _SAME_NAME:
        chat.set(name, getattr(body, name), name)
    chat.set("max_completion_tokens", body.max_output_tokens, "max_output_tokens")
    if body.tools:
        chat.set("tools", [_tool(tool) for tool in body.tools], "tools")
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        chat.set("tool_choice", {"type": "function", "function": {"name": choice.name}}, "tool_choice")
    else:
        chat.set("tool_choice", choice, "tool_choice")
    if body.text is not None and body.text.format is not None:
        chat.set("response_format", _response_format(body.text.format, chat), "text.format")
    if body.reasoning is not None:
        chat.set("reasoning_effort", body.reasoning.effort, "reasoning.effort")
    return chat


class _Turns:
    """Items as messages; what the assistant said, thought and called in a row is one message."""

    def __init__(self, chat: ChatFields) -> None:
        self._chat = chat
        self._turn: dict[str, object] | None = None
        """The assistant's message that a call may still be added to."""
        self._calls: list[object] = []

    def add_all(self, items: Sequence[Item]) -> None:
        for index, item in enumerate(items):
            place = f"input[{index}]"
            if isinstance(item, ReasoningItem):
                self._open(place)["reasoning_content"] = _thoughts(item)
            elif isinstance(item, FunctionCallItem):
                self._add_call(item, place)
            elif isinstance(item, MessageItem) and item.role == "assistant":
                self._add_answer(item, place)
            else:
                self._turn = None
                self._chat.add_message(_other(item), place)

    def _add_answer(self, item: MessageItem, place: str) -> None:
        turn = self._turn
        if turn is None or turn["content"] is not None or self._calls:
            turn = self._open(place)
        turn["content"] = _text(item.content)

    def _add_call(self, item: FunctionCallItem, place: str) -> None:
        turn = self._turn if self._turn is not None else self._open(place)
        function = {"name": item.name, "arguments": item.arguments}
        self._chat.add_call_place(len(self._calls), place)
        self._calls.append({"id": item.call_id, "type": "function", "function": function})
        turn["tool_calls"] = self._calls

    def _open(self, place: str) -> dict[str, object]:
        self._turn = {"role": "assistant", "content": None}
        self._calls = []
        self._chat.add_message(self._turn, place)
        return self._turn


def _other(item: MessageItem | FunctionOutputItem) -> dict[str, object]:
    if isinstance(item, FunctionOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    return {"role": item.role, "content": _text(item.content)}


def _text(content: str | Sequence[InputText | OutputText | Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)


def _thoughts(item: ReasoningItem) -> str:
    return "".join(part.text for part in item.content or item.summary or ())


def _tool(tool: FunctionTool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    for name in ("description", "parameters", "strict"):
        value = getattr(tool, name)
        if value is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _response_format(wanted: TextFormat, chat: ChatFields) -> dict[str, object]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema is None:
        chat.refuse("text.format.schema", "is required where the type is json_schema")
    schema: dict[str, object] = {"name": wanted.name or "answer", "schema": wanted.schema}
    for name in ("description", "strict"):
        value = getattr(wanted, name)
        if value is not None:
            schema[name] = value
    return {"type": "json_schema", "json_schema": schema}
