"""What one answer was: its times and tokens, or why it failed. Read from the response after the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.http_stream import Response


@dataclass(frozen=True)
class Expected:
    """What the answer must say in `usage`; None is not checked."""

    output_tokens: int
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Answer:
    """One answer. `gaps_s` are the times between events that carry text; `failure` is "" when all is as expected."""

    failure: str = ""
    text: str = ""
    first_s: float = 0.0  # from the request to the first text
    total_s: float = 0.0
    gaps_s: Sequence[float] = field(default_factory=tuple)
    text_times_s: Sequence[float] = field(default_factory=tuple)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def per_token_s(self) -> float:
        """Mean time per token after the first."""
        return (self.total_s - self.first_s) / max(self.output_tokens - 1, 1)


class _UnexpectedError(Exception):
    """The answer is not what it must be."""


def read_answer(response: Response, expected: Expected) -> Answer:
    """Checks a streamed answer to its last byte: status, form, order, finish reason, usage."""
    try:
        return _read(response, expected)
    except _UnexpectedError as error:
        return Answer(failure=str(error))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return Answer(failure=f"an event that is not understood: {type(error).__name__}: {error}")


def _read(response: Response, expected: Expected) -> Answer:
    if response.status != 200:
        raise _UnexpectedError(f"status {response.status}: {_error_message(response.body)}")
    if not response.events or response.events[-1][1] != b"[DONE]":
        raise _UnexpectedError("the stream does not end with [DONE]")
    texts: list[str] = []
    times_s: list[float] = []
    finish: str | None = None
    usage: dict[str, Any] = {}
    for time_s, data in response.events[:-1]:
        event = json.loads(data)
        if "error" in event:
            raise _UnexpectedError(f"error event: {event['error'].get('message')}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if text:
                texts.append(text)
                times_s.append(time_s)
            finish = choice["finish_reason"] or finish
    _require("finish_reason", finish, "length")
    _require("completion_tokens", usage.get("completion_tokens"), expected.output_tokens)
    if expected.prompt_tokens is not None:
        _require("prompt_tokens", usage.get("prompt_tokens"), expected.prompt_tokens)
    return Answer(
        text="".join(texts),
        first_s=(times_s[0] if times_s else response.ended_s) - response.sent_s,
        total_s=response.ended_s - response.sent_s,
        gaps_s=[later - earlier for earlier, later in pairwise(times_s)],
        text_times_s=times_s,
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    )


def _require(name: str, found: object, expected: object) -> None:
    if found != expected:
        raise _UnexpectedError(f"{name} is {found!r}, not {expected!r}")


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return repr(body[:200])
