"""Tokenizer process: a chat that was written in another API's words, and the way back from its fields to those words.

The fields are those of POST /v1/chat/completions and go through its checks; an error that names one of them is told
with the name that the client used. Owns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from services.tokenizer.api_error import ApiError, bad_field

_INDEXED = re.compile(r"messages\[(\d+)\](.*)", re.DOTALL)
_FIELD = re.compile(r"(\w+)(.*)", re.DOTALL)


class ChatFields:
    """The fields of a chat and their origins."""

    def __init__(self, fields: dict[str, object], renamed: Mapping[str, str], prompt_name: str = "messages") -> None:
        """An empty chat with some fields that need no origin.

        Args:
            fields: They have the same names for the client.
            renamed: Part of a field's name behind its first word -> what it is for the client, longest first.
            prompt_name: What the client calls `messages`.
        """
        self._renamed = renamed
        self._messages: list[dict[str, object]] = []
        self.fields: dict[str, object] = {**fields, "messages": self._messages}
        self._origins: dict[str, str] = {"messages": prompt_name}
        self._places: list[str] = []

    @property
    def messages(self) -> Sequence[dict[str, object]]:
        """The messages so far."""
        return self._messages

    def set(self, name: str, value: object, origin: str) -> None:
        """A field of the chat and what the client calls it; None is left out."""
        if value is not None:
            self.fields[name] = value
            self._origins[name] = origin

    def add_message(self, message: dict[str, object], place: str) -> None:
        """The next message and where the client wrote it."""
        self._messages.append(message)
        self._places.append(place)

    def refuse(self, place: str, problem: str) -> NoReturn:
        """A place of the client's body that means nothing as a chat.

        Raises:
            ApiError: always, 400 naming the place.
        """
        raise bad_field(place, problem)

    def in_clients_words(self, error: ApiError) -> ApiError:
        """An error of the chat's checks with the field's name as the client wrote it, in the message too."""
        if error.param is None:
            return error
        name = self._clients_name(error.param)
        message = str(error.message)
        if message.startswith(f"{error.param}: "):
            message = f"{name}: {message.removeprefix(f'{error.param}: ')}"
        return ApiError(
            error.status, message, code=error.code, param=name, retry_after_s=error.retry_after_s, allow=error.allow
        )

    def _clients_name(self, param: str) -> str:
        indexed = _INDEXED.fullmatch(param)
        if indexed and int(indexed[1]) < len(self._places):
            place = self._places[int(indexed[1])]
            return place if indexed[2].startswith(".") and not place.startswith("messages") else place + indexed[2]
        found = _FIELD.fullmatch(param)
        if found and found[1] in self._origins:
            origin, rest = self._origins[found[1]], found[2]
            for part, name in self._renamed.items():
                rest = rest.replace(part, name)
            return origin + rest if origin == found[1] else origin
        return param
