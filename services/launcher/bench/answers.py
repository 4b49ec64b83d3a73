"""What one answer was: its times and tokens, or why it failed. Read from the response after the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from services.launcher.http.response import Response


@dataclass(frozen=True)
class Expected:
    """What the answer must say in `usage`.

    `output_tokens` is the exact number, or with `may_stop` the most; `prompt_tokens` None is not checked.
    """

    output_tokens: int
    prompt_tokens: int | None = None
    may_stop: bool = False


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
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return Answer(failure=f"an event that is not understood: {type(error).__name__}: {error}")


def _read(response: Response, expected: Expected) -> Answer:
    if response.status != 200:
        raise _UnexpectedError(response.refusal())
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
            text = _text_of(choice)
            if text:
                texts.append(text)
                times_s.append(time_s)
            finish = choice["finish_reason"] or finish
    _check(finish, usage, expected)
    return Answer(
        text="".join(texts),
        first_s=(times_s[0] if times_s else response.ended_s) - response.sent_s,
        total_s=response.ended_s - response.sent_s,
        gaps_s=[later - earlier for earlier, later in pairwise(times_s)],
        text_times_s=times_s,
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def _text_of(choice: Mapping[str, Any]) -> str:
    """The text of one choice of an event: of an answer, or of a thought before it."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice["delta"]
    return delta.get("content") or delta.get("reasoning_content") or ""


def _check(finish: str | None, usage: Mapping[str, Any], expected: Expected) -> None:
    num_tokens = usage.get("completion_tokens")
    if expected.may_stop:
        if finish not in ("stop", "length"):
            raise _UnexpectedError(f"finish_reason is {finish!r}, neither 'stop' nor 'length'")
        if not isinstance(num_tokens, int) or not 0 <= num_tokens <= expected.output_tokens:
            raise _UnexpectedError(f"completion_tokens is {num_tokens!r}, at most {expected.output_tokens} were wanted")
    else:
        _require("finish_reason", finish, "length")
        _require("completion_tokens", num_tokens, expected.output_tokens)
    if expected.prompt_tokens is not None:
        _require("prompt_tokens", usage.get("prompt_tokens"), expected.prompt_tokens)


def _require(name: str, found: object, expected: object) -> None:
    if found != expected:
        raise _UnexpectedError(f"{name} is {found!r}, not {expected!r}")
