"""Tokenizer process: a chat that was written in another API's words, and the way back from its fields to those words.

The fields are those of POST /v1/chat/completions and go through its checks; an error that names one of them is told
with the name that the client used. Owns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from services.tokenizer.api_error import ApiError, bad_field
from services.tokenizer.submission import AnswersWanted

_INDEXED = re.compile(r"messages\[(\d+)\](.*)", re.DOTALL)
_CALL = re.compile(r"messages\[\d+\]\.tool_calls\[\d+\]")
_FIELD = re.compile(r"(\w+)(.*)", re.DOTALL)


@dataclass(frozen=True)
class ClientWords:
    """What an API calls the parts of a chat.

    Attributes:
        renamed: Part of a field's name behind its first word -> what it is for the client, longest first.
        not_shown: What a template may leave out, as a chat names it -> what it is for the client.
        prompt: `messages`.
    """

    renamed: Mapping[str, str]
    not_shown: Mapping[str, str]
    prompt: str = "messages"


class ChatFields:
    """The fields of a chat and their origins."""

    def __init__(self, fields: dict[str, object], words: ClientWords) -> None:
        """An empty chat with some fields that need no origin: they have the same names for the client."""
        self._words = words
        self._messages: list[dict[str, object]] = []
        self.fields: dict[str, object] = {**fields, "messages": self._messages}
        self._origins: dict[str, str] = {"messages": words.prompt}
        self._places: list[str] = []
        self._call_places: dict[str, str] = {}

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

    def add_call_place(self, index: int, place: str) -> None:
        """Where the client wrote a call of the message that was added last: its number and the place."""
        self._call_places[f"messages[{len(self._messages) - 1}].tool_calls[{index}]"] = place

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

    def in_clients_names(self, wanted: AnswersWanted) -> AnswersWanted:
        """The same, with the field of its grammar as the client wrote it."""
        param = wanted.grammar_param
        return wanted if param is None else replace(wanted, grammar_param=self._clients_name(param))

    def clients_names(self, names: Sequence[str]) -> list[str]:
        """Names of fields of the chat, and of what its template does not show, as the client wrote them."""
        return list(dict.fromkeys(map(self._clients_name, names)))

    def _clients_name(self, param: str) -> str:
        if param in self._words.not_shown:
            return self._words.not_shown[param]
        call = _CALL.match(param)
        if call and call[0] in self._call_places:
            return self._call_places[call[0]] + self._renamed(param.removeprefix(call[0]))
        indexed = _INDEXED.fullmatch(param)
        if indexed and int(indexed[1]) < len(self._places):
            place = self._places[int(indexed[1])]
            return place if indexed[2].startswith(".") and not place.startswith("messages") else place + indexed[2]
        found = _FIELD.fullmatch(param)
        if found and found[1] in self._origins:
            origin, rest = self._origins[found[1]], self._renamed(found[2])
            if origin != found[1]:
                return origin + (rest.removeprefix(".json_schema") if rest.startswith(".json_schema.") else "")
            return origin + rest
        return param

    def _renamed(self, rest: str) -> str:
        for part, name in self._words.renamed.items():
            rest = rest.replace(part, name)
        return rest
