"""Tokenizer process: tools, calls and tools' answers as plain messages, for chat templates that show none of these.

    tools            -> a text at the end of the system message, which is made if there is none
    assistant, calls -> the content, then <tool_call> JSON </tool_call> for each call
    tool             -> a user's message: <tool_response> ... </tool_response>, those in a row in one message

Calls are asked for in the form of Hermes, which most open models have seen. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from services.tokenizer.conversation import Message
from services.tokenizer.tool_hermes import CLOSING, OPENING

_INTRODUCTION = """\
# Tools

You can call functions. These are there, each described in JSON:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as a JSON object between two tags, exactly so:
{opening}
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}
{closing}
The result comes between <tool_response> and </tool_response>. Without need of a function, simply answer."""


def in_default_form(
    messages: Sequence[Message], tools: Sequence[object] | None, *, takes_system: bool
) -> list[Message]:
    """The same conversation without tools, calls and tools' answers but in its texts.

    Args:
        messages: As templates expect them: contents are texts, arguments objects.
        tools: The declared functions; None for none.
        takes_system: Whether the template takes a system message; else the first user's message holds the tools.
    """
    plain: list[Message] = []
    answers: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            answers.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        _add_answers(plain, answers)
        plain.append(_with_calls(message))
    _add_answers(plain, answers)
    if tools:
        _introduce(plain, _introduction(tools), takes_system)
    return plain


def _add_answers(plain: list[Message], answers: list[str]) -> None:
    if answers:
        plain.append({"role": "user", "content": "\n".join(answers)})
        answers.clear()


def _with_calls(message: Message) -> Message:
    calls = cast(Sequence[Mapping[str, object]], message.get("tool_calls") or ())
    if not calls or message["role"] != "assistant":
        return message
    texts = [str(message["content"])] if message["content"] else []
    texts += [f"{OPENING}\n{_call(cast(Mapping[str, object], call['function']))}\n{CLOSING}" for call in calls]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(texts)}


def _call(function: Mapping[str, object]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)


def _introduction(tools: Sequence[object]) -> str:
    written = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _INTRODUCTION.format(tools=written, opening=OPENING, closing=CLOSING)


def _introduce(plain: list[Message], text: str, takes_system: bool) -> None:
    roles = ("system", "developer") if takes_system else ("user",)
    at = 0 if takes_system else next((i for i, message in enumerate(plain) if message["role"] == "user"), 0)
    if plain and plain[at]["role"] in roles:
        content = str(plain[at]["content"])
        order = [content, text] if takes_system else [text, content]
        plain[at] = {**plain[at], "content": "\n\n".join(part for part in order if part)}
    else:
        plain.insert(0, {"role": roles[0], "content": text})
