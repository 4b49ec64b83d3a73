"""Prompts from a file: JSON lines, or one JSON list as the ShareGPT dumps are.

    {"prompt": "text or token ids", "output_tokens": 64}
    {"messages": [{"role": "user", "content": "..."}], "max_tokens": 64}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}

Of a conversation the first turn of the person is asked, as other load tools do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from services.launcher.bench.sessions import Message, Session, Turn
from services.launcher.errors import CommandError

_LENGTH_KEYS = ("output_tokens", "max_tokens", "output_tokens_count", "output_len")
_PEOPLE = ("human", "user")


def read_sessions(path: Path, output_tokens: int, limit: int) -> list[Session]:
    """The first `limit` prompts of a file.

    Args:
        path: of the file, in UTF-8.
        output_tokens: of answers whose entry does not say how long they shall be.
        limit: how many are wanted; fewer when the file has fewer.

    Raises:
        CommandError: the file cannot be read, holds no prompt, or an entry is of none of the forms; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    sessions: list[Session] = []
    for place, entry in _entries(path, text):
        if len(sessions) == limit:
            break
        sessions.append(_session(f"{path}, {place}", entry, output_tokens))
    if not sessions:
        raise CommandError(f"{path} holds no prompt")
    return sessions


def _entries(path: Path, text: str) -> Iterator[tuple[str, object]]:
    if text.lstrip().startswith("["):
        entries = _parsed(path, "", text)
        assert isinstance(entries, list)
        yield from ((f"entry {index}", entry) for index, entry in enumerate(entries))
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"line {number}", _parsed(path, f", line {number}", line)


def _parsed(path: Path, place: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise CommandError(f"{path}{place}: is not JSON") from None


def _session(place: str, entry: object, output_tokens: int) -> Session:
    if not isinstance(entry, dict):
        raise CommandError(f"{place}: is not an object")
    length = next((entry[key] for key in _LENGTH_KEYS if entry.get(key) is not None), output_tokens)
    if type(length) is not int or length < 1:
        raise CommandError(f"{place}: the length of the answer is {length!r}, not a number of at least 1")
    match entry:
        case {"prompt": str(prompt)} if prompt:
            return Session([Turn(prompt, length)])
        case {"prompt": [*ids]} if ids and all(type(item) is int and item >= 0 for item in ids):
            return Session([Turn(ids, length)])
        case {"messages": [*messages]}:
            return _of_messages(place, messages, length)
        case {"conversations": [*parts]}:
            return _of_conversation(place, parts, length)
    raise CommandError(f"{place}: has no prompt, messages or conversations that can be sent")


def _of_messages(place: str, messages: list[object], length: int) -> Session:
    opening: list[Message] = []
    for message in messages:
        match message:
            case {"role": str(role), "content": str(content)}:
                opening.append({"role": role, "content": content})
            case _:
                raise CommandError(f"{place}: a message has no role or no text")
    while opening and opening[-1]["role"] != "user":
        opening.pop()  # what the model said is its to say
    if not opening:
        raise CommandError(f"{place}: has no message of a user")
    last = opening.pop()
    return Session([Turn(last["content"], length)], opening)


def _of_conversation(place: str, parts: list[object], length: int) -> Session:
    for part in parts:
        match part:
            case {"from": str(who), "value": str(text)} if who in _PEOPLE and text:
                return Session([Turn(text, length)])
    raise CommandError(f"{place}: nobody asks anything in this conversation")
