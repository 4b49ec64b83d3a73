"""A conversation: what was asked and answered, and the fields that every request carries. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from services.launcher.errors import CommandError

_NUMBERS = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "timeout_s",
)  # fmt: skip
_COUNTS = ("top_k", "max_tokens", "min_tokens", "seed", "priority")
_TEXTS = ("reasoning_effort", "cache_salt")
FIELDS = (*_NUMBERS, *_COUNTS, *_TEXTS, "stop")
_DEFAULT = "default"


@dataclass
class Turn:
    """A question and the answer as far as it came."""

    question: str
    answer: str = ""


@dataclass
class Conversation:
    """The state of a chat."""

    model: str
    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    fields: dict[str, object] = field(default_factory=dict)

    def messages(self) -> list[dict[str, str]]:
        """What a server is sent; the last turn without an answer is the one that is asked."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            if turn.answer:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def body(self) -> dict[str, object]:
        """The request for the next answer, as a stream that tells its usage."""
        return {
            "model": self.model,
            "messages": self.messages(),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }

    def export(self) -> str:
        """The conversation as a file that `tokenway render` and other tools read."""
        return json.dumps({"model": self.model, "messages": self.messages()}, ensure_ascii=False, indent=2) + "\n"

    def set_field(self, argument: str) -> None:
        """Sets a field from `NAME VALUE`; the value `default` takes it out of the requests.

        Raises:
            CommandError: the name is none that is known, or the value is of the wrong kind.
        """
        name, _, text = argument.partition(" ")
        text = text.strip()
        if name not in FIELDS:
            raise CommandError(f"there is no field {name!r}; there are {', '.join(FIELDS)}")
        if not text:
            raise CommandError(f"/set {name} needs a value, or `default`")
        if text == _DEFAULT:
            self.fields.pop(name, None)
        else:
            self.fields[name] = _value(name, text)


def _value(name: str, text: str) -> object:
    try:
        if name in _NUMBERS:
            return float(text)
        if name in _COUNTS:
            return int(text)
    except ValueError:
        kind = "a number" if name in _NUMBERS else "a whole number"
        raise CommandError(f"{name} must be {kind}, not {text!r}") from None
    return [text] if name == "stop" else text
