"""A chat request as templates see it: messages brought into one shape, checked, with plain text contents.

Runs in the tokenizer process, on a pool thread for long conversations; owns nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, TypeAlias, cast

from services.tokenizer.prompt_errors import ConversationError, InvalidTextError, MissingKeyError

Message: TypeAlias = "dict[str, object]"

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# What reaches a template of a message; other keys that clients send along mean nothing to a model.
_MESSAGE_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")
_MAX_DEPTH = 72  # a tool around a schema of 32 levels, with `properties` between them
_MAX_TEMPLATE_KWARGS = 16
_MAX_KWARG_CHARACTERS = 256
_MAX_KWARG_NUMBER = 1_000_000


@dataclass(frozen=True)
class Conversation:
    """What a client wants rendered.

    Attributes:
        messages: As the client sent them: `role`, `content` (text, list of text parts, null or absent), and optionally
            `name`, `tool_calls` or `function_call`, `tool_call_id`, `reasoning_content`. Other keys are not shown to
            the template.
        tools: The functions that the model may call, as the client sent them; None or empty for none.
        template_kwargs: Switches for the template such as `enable_thinking`: short text, bool, small number, None.
        add_generation_prompt: Open the assistant's turn at the end.
        tools_param: The field that the tools came in, for errors.
        continue_final_message: Leave the last (assistant's) turn open instead, so that the model continues its text.
    """

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools_param: str = "tools"

    @property
    def longest_field(self) -> str:
        """Which field makes a prompt too long: the one that is the larger part of it."""
        are_tools = self.tools and len(json.dumps(self.tools)) > len(json.dumps(self.messages))
        return self.tools_param if are_tools else "messages"

    @property
    def has_optional_keys(self) -> bool:
        """Whether there is something that only some templates show."""
        return any(_optional_keys(message) for message in self.messages)

    def is_short(self, max_characters: int) -> bool:
        """Return whether rendering is surely quick: few plain messages of at most so many characters in all."""
        if len(self.messages) > 16 or self.tools:
            return False
        num_characters = 0
        for message in self.messages:
            content = message.get("content") if isinstance(message, Mapping) else None
            if not isinstance(content, str) or message.get("tool_calls"):
                return False
            num_characters += len(content)
        return num_characters <= max_characters


def template_messages(conversation: Conversation, knows_developer: bool) -> list[Message]:
    """Return the messages as templates expect them.

    `content` is always text (a list of parts is joined with nothing between, null and absent are empty), null keys are
    dropped, arguments of tool calls become objects, and `developer` becomes `system` for templates that do not know it.

    Raises:
        ConversationError: an unknown role, a part that is no text, a wrong shape; `param` names the place.
    """
    if not conversation.messages:
        raise ConversationError("messages must not be empty", "messages")
    return [
        _message(message, f"messages[{index}]", knows_developer) for index, message in enumerate(conversation.messages)
    ]


def marked(messages: Sequence[Message], new_mark: Callable[[], str]) -> tuple[list[Message], dict[str, str]]:
    """Return the messages with a mark in everything that only some templates show, and the place of each mark."""
    places: dict[str, str] = {}
    copies = [dict(message) for message in messages]
    for message in copies:
        for key, text in _optional_keys(message).items():
            places[mark := new_mark()] = "messages[tool].content" if key == "content" else f"messages[].{key}"
            if key == "tool_calls":
                message[key] = [_named(call, mark) for call in cast(Sequence[Mapping[str, object]], message[key])]
            else:
                message[key] = text + mark
    return copies, places


def checked_template_kwargs(conversation: Conversation, reserved: frozenset[str]) -> dict[str, object]:
    """Return the client's template arguments.

    Raises:
        ConversationError: a name that is reserved or no identifier, or a value that is not small and plain.
    """
    kwargs = conversation.template_kwargs
    if len(kwargs) > _MAX_TEMPLATE_KWARGS:
        raise ConversationError(f"more than {_MAX_TEMPLATE_KWARGS} template arguments", "chat_template_kwargs")
    for name, value in kwargs.items():
        param = f"chat_template_kwargs.{name[:64]}"
        if not name.isidentifier() or name.startswith("_") or name in reserved:
            raise ConversationError("this name cannot be set for a chat template", param)
        if not _is_small_plain(value):
            raise ConversationError("must be a bool, a small number, a short text or null", param)
    return dict(kwargs)


class TextMapping(Protocol):
    """What to do with the texts of a JSON value."""

    def value(self, text: str) -> str:
        """Return what takes the place of a text."""

    def key(self, text: str) -> str:
        """Return what takes the place of a key of an object."""


def map_texts(value: object, mapping: TextMapping, depth: int = 0) -> object:
    """Return a copy of a JSON value with every text in it replaced.

    Raises:
        ConversationError: nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise ConversationError(f"nested deeper than {_MAX_DEPTH}")
    if isinstance(value, str):
        return mapping.value(value)
    if isinstance(value, Mapping):
        return {mapping.key(str(key)): map_texts(item, mapping, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [map_texts(item, mapping, depth + 1) for item in value]
    return value


def check_text(text: str, param: str | None = None) -> None:
    """Check that a client's text can be encoded.

    Raises:
        InvalidTextError: it holds half of a surrogate pair (JSON can spell one, UTF-8 cannot).
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidTextError(f"half of a surrogate pair at character {error.start} of the text", param) from None


def _message(message: object, place: str, knows_developer: bool) -> Message:
    if not isinstance(message, Mapping):
        raise ConversationError("must be an object", place)
    role = message.get("role")
    if role is None:
        raise MissingKeyError(f"is required: the role must be one of {', '.join(ROLES)}", f"{place}.role")
    if role not in ROLES:
        raise ConversationError(f"the role must be one of {', '.join(ROLES)}", f"{place}.role")
    if role == "developer" and not knows_developer:
        role = "system"
    if role == "function":  # the older spelling of a tool's answer
        role = "tool"
    rendered: Message = {"role": role, "content": _content_text(message.get("content"), f"{place}.content")}
    for key in _MESSAGE_KEYS:
        value = message.get(key)
        if value is not None and value != []:
            rendered[key] = _tool_calls(value, f"{place}.tool_calls") if key == "tool_calls" else value
    if message.get("function_call") is not None:
        rendered["tool_calls"] = [_legacy_call(message, f"{place}.function_call")]
    return rendered


def _optional_keys(message: Mapping[str, object]) -> dict[str, str]:
    """What of a message only some templates show, and its text where it is one."""
    found: dict[str, str] = {}
    if message.get("tool_calls"):
        found["tool_calls"] = ""
    if thoughts := message.get("reasoning_content"):
        found["reasoning_content"] = str(thoughts)
    if message.get("role") == "tool":
        found["content"] = str(message.get("content"))
    return found


def _named(call: Mapping[str, object], mark: str) -> dict[str, object]:
    function = cast(Mapping[str, object], call["function"])
    return {**call, "function": {**function, "name": f"{function['name']}{mark}"}}


def _content_text(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ConversationError("the content must be text, a list of parts or null", place)
    return "".join(_part_text(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if isinstance(text, str):
            return text
    raise ConversationError("only text parts are supported", place)


def _tool_calls(calls: object, place: str) -> list[object]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ConversationError("must be a list", place)
    return [_tool_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, place: str) -> dict[str, object]:
    if not isinstance(call, Mapping):
        raise ConversationError("must hold a function with a name", place)
    return {**call, "function": _called(call.get("function"), place, f"{place}.function")}


def _called(function: object, call_place: str, place: str) -> dict[str, object]:
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError("must hold a function with a name", call_place)
    return {**function, "arguments": _arguments(function.get("arguments"), f"{place}.arguments")}


def _legacy_call(message: Mapping[str, object], place: str) -> dict[str, object]:
    """`function_call`, the older spelling of a single call."""
    if message.get("tool_calls"):
        raise ConversationError("cannot go together with tool_calls", place)
    return {"type": "function", "function": _called(message["function_call"], place, place)}


def _arguments(arguments: object, place: str) -> Mapping[str, object]:
    """Templates print arguments as JSON themselves, so JSON text becomes the object; none are an empty one."""
    value: object = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, parse_constant=_refuse) if arguments.strip() else None
        except (ValueError, RecursionError):
            raise ConversationError("is not valid JSON; it must be the JSON text of an object", place) from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConversationError("must be an object, or the JSON text of one", place)
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _is_small_plain(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, str):
        return len(value) <= _MAX_KWARG_CHARACTERS
    return isinstance(value, int | float) and abs(value) <= _MAX_KWARG_NUMBER
