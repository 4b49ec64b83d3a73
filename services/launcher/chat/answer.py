"""One streamed answer of the chat route, event by event, and what can be told of it. Pure but for the given times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.launcher.errors import CommandError


@dataclass(frozen=True)
class Piece:
    """New text of an answer."""

    text: str
    is_reasoning: bool = False


@dataclass
class Answer:
    """An answer while it comes. Times are those of one monotonic clock."""

    asked_s: float
    text: str = ""
    first_s: float = 0.0  # when the first text came; 0 before
    last_s: float = 0.0
    finish_reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Any] = field(default_factory=dict)

    def take(self, data: bytes, now_s: float) -> Piece | None:
        """Takes the data of an event; the text in it, if there is any.

        Raises:
            CommandError: the server tells of an error, or the event is none of the API's.
        """
        try:
            event = json.loads(data)
            if "error" in event:
                error = event["error"]
                raise CommandError(str(error.get("message") if isinstance(error, dict) else error))
            self.usage = event.get("usage") or self.usage
            self.timings = event.get("timings") or self.timings
            piece = None
            for choice in event.get("choices") or ():
                piece = self._choice(choice) or piece
        except (ValueError, TypeError, AttributeError, KeyError):
            raise CommandError(f"an event of the stream is not understood: {data[:80]!r}") from None
        if piece is not None:
            self.first_s = self.first_s or now_s
            self.last_s = now_s
        return piece

    def _choice(self, choice: Mapping[str, Any]) -> Piece | None:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            return Piece(reasoning, is_reasoning=True)
        text = delta.get("content")
        if not text:
            return None
        self.text += text
        return Piece(text)

    def statistics(self) -> list[str]:
        """What is known of it: as this client saw it, then as the server tells it."""
        if not self.first_s:
            return ["no text came"]
        prompt, output = self.usage.get("prompt_tokens"), self.usage.get("completion_tokens")
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        parts = [f"first token after {1000 * (self.first_s - self.asked_s):.0f} ms"]
        if output:
            parts.append(f"{output} tokens")
            if output > 1 and self.last_s > self.first_s:
                parts.append(f"{(output - 1) / (self.last_s - self.first_s):.1f} tok/s")
        if prompt is not None:
            parts.append(f"prompt {prompt} tokens" + (f", {cached} of them cached" if cached is not None else ""))
        if self.finish_reason and self.finish_reason != "stop":
            parts.append(f"ended by {self.finish_reason}")
        told = [f"{name} {value}" for name, value in flattened(self.timings)]
        return ["; ".join(parts), *(["server: " + "; ".join(told)] if told else [])]


def flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The numbers in an object and in the objects inside it, as (name, value) for people."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += flattened(value, f"{prefix}{name} ")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            continue
        else:
            found.append((prefix + name, f"{value:g}" if isinstance(value, int) else f"{value:.4g}"))
    return found
