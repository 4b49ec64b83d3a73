"""Tokenizer process: the keys of a chat's messages: which are known, of which types, and which are nobody's.

The same three kinds as the fields of a request; `docs/api.md` lists the same names and a test holds the two together.
Roles, contents and tool calls are looked into where they are rendered. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.tokenizer.api_error import Code, bad_field
from services.tokenizer.field_tables import Neutral, is_neutral

# What reaches the chat template; the second part is text or null.
SHOWN = frozenset({"role", "content", "tool_calls", "function_call", "name", "tool_call_id", "reasoning_content"})
TEXTS = ("name", "tool_call_id", "reasoning_content")

# name -> the values that mean the same as leaving it out (null always does)
UNBUILT: Mapping[str, Neutral] = {
    "audio": (),
    "refusal": ("",),
    "reasoning": ("",),
}

# Parts of an earlier answer that are sent back with it, for readers.
WITHOUT_EFFECT = frozenset({"annotations"})

_PART_KEYS = frozenset({"type", "text", "refusal"})


def unknown_message_keys(messages: Sequence[Mapping[str, object]]) -> list[str]:
    """Checks the keys of all messages; the unknown ones, each once, as `messages[].NAME`.

    Raises:
        ApiError: 400 naming the message and the key: it is not built, or of a wrong type.
    """
    unknown: dict[str, None] = {}
    for index, message in enumerate(messages):
        for name, value in message.items():
            if name in UNBUILT:
                if not is_neutral(value, UNBUILT[name]):
                    problem = "is not supported by this server"
                    raise bad_field(f"messages[{index}].{name}", problem, Code.UNSUPPORTED_FIELD)
            elif name in TEXTS:
                if value is not None and not isinstance(value, str):
                    raise bad_field(f"messages[{index}].{name}", "must be a text")
            elif name not in SHOWN and name not in WITHOUT_EFFECT:
                unknown[f"messages[].{name}"] = None
        for name in _unknown_part_keys(message.get("content")):
            unknown[f"messages[].content[].{name}"] = None
    return list(unknown)


def _unknown_part_keys(content: object) -> list[str]:
    if not isinstance(content, list):
        return []
    return [name for part in content if isinstance(part, dict) for name in part if name not in _PART_KEYS]
