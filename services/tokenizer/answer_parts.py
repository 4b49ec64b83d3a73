"""Tokenizer process: what an answer is made of on its way from the detokenizer to a client, whatever the route.

    TextChunks -> journal -> parser (text to parts) -> format (parts to bytes of one API) -> connection | body

A parser knows how a model family writes tool calls and reasoning; a format knows how one API spells an answer. Neither
knows the other, a socket or a clock. Every part is given once, in order; their texts joined are the answer's text, less
the markup of tool calls and reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from services.tokenizer.api_error import ApiError
from services.wire.messages import Finish


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user, not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought aloud, not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model begins call number `index` (from 0) of the function `name`; given once for each call."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of call `index`, as JSON text; the fragments joined are one JSON object."""

    index: int
    fragment: str


Part: TypeAlias = Text | Reasoning | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability, and those of the likeliest at its place, best first; -inf is possible."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What is new of one answer: its parts, the ids that they came from, and one `TokenLogprobs` an id if asked for."""

    parts: Sequence[Part]
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How one answer ended. `stop` is the stop string or the stop id that ended it, None otherwise."""

    finish: Finish
    has_tool_calls: bool = False
    stop: str | int | None = None
    rest: AnswerDelta = AnswerDelta(())
    """Ids and log-probabilities that no text followed, such as an end id's."""


class AnswerParser(Protocol):
    """Turns the text of one answer into parts. It holds back only what may still become markup."""

    def feed(self, text: str) -> Sequence[Part]:
        """The parts that are certain after more text."""

    def finish(self) -> Sequence[Part]:
        """What was held back: the answer has ended."""


class AnswerFormat(Protocol):
    """One API's spelling of the answers of one request. Every method gives whole events, or nothing (b"")."""

    def opening(self, choice: int) -> bytes:
        """The events before anything of an answer."""

    def delta(self, choice: int, delta: AnswerDelta) -> bytes:
        """The events for what is new."""

    def finish(self, choice: int, end: AnswerEnd) -> bytes:
        """The events at the end of one answer."""

    def ending(self, usage: Mapping[str, object]) -> bytes:
        """The last events of the stream, when every answer has ended."""

    def error(self, error: ApiError) -> bytes:
        """The last events of a stream that fails."""

    def keep_alive(self) -> bytes:
        """What is sent when nothing else is."""

    def body(
        self, answers: Sequence[Sequence[AnswerDelta]], ends: Sequence[AnswerEnd], usage: Mapping[str, object]
    ) -> bytes:
        """The whole answer as one body: for each answer the deltas that it came in, and its end."""
