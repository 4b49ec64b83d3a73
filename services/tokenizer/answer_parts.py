"""Tokenizer process: what an answer is made of on its way from the detokenizer to a client, whatever the route.

    TextChunks -> journal -> parser (text to parts) -> format (parts to bytes of one API) -> connection | body

A parser knows how a model family writes tool calls and reasoning; a format knows how one API spells an answer. Neither
knows the other, a socket or a clock. Every part is given once, in order; their texts joined are the answer's text, less
the markup of tool calls and reasoning. The small things are msgspec structs: one is made for every chunk of text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from services.tokenizer.api_error import ApiError
from services.wire.finish import Finish


class Text(msgspec.Struct, frozen=True, gc=False):
    """Text for the user, not empty."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text that the model thought aloud, not empty."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """The model begins call number `index` (from 0) of the function `name`; given once for each call."""

    index: int
    call_id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the arguments of call `index`, as JSON text; the fragments joined are one JSON object."""

    index: int
    fragment: str


Part: TypeAlias = Text | Reasoning | ToolCallStart | ToolCallArguments


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """One token's log-probability, and those of the likeliest at its place, best first; -inf is possible.

    `logprob` is None for the first token of a prompt: nothing comes before it.
    """

    token_id: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()


class AnswerDelta(msgspec.Struct, frozen=True):
    """What is new of one answer: its parts, the ids that they came from, and one `TokenLogprobs` an id if asked for.

    Ids are there only if the request shows them. `prompt_logprobs` (one for each token of the prompt) comes at most
    once, in the first delta of an answer; with `echo` that delta's `logprobs` are the prompt's too. `usage` is what was
    used so far, if the request wants it in every chunk.
    """

    parts: Sequence[Part]
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    usage: Mapping[str, object] | None = None


NOTHING = AnswerDelta(())


class AnswerEnd(msgspec.Struct, frozen=True):
    """How one answer ended.

    `stop` is the stop string or the client's own stop id that ended it, None otherwise; `rest` holds the ids and
    log-probabilities that no text followed, such as an end id's; `embedding` is the prompt's pooled hidden state
    (little-endian float32) if that was asked for; `timings` come with the last answer of a request to end;
    `cached_tokens` is how much of its prompt came from the prefix cache; `has_cut_call` says that the arguments of the
    last call are no whole object: it cannot be run.
    """

    finish: Finish
    has_tool_calls: bool = False
    stop: str | int | None = None
    rest: AnswerDelta = NOTHING
    embedding: bytes = b""
    timings: Mapping[str, object] | None = None
    cached_tokens: int = 0
    has_cut_call: bool = False

    @property
    def is_for_tools(self) -> bool:
        """Whether it ends with calls that the client can run."""
        return self.has_tool_calls and not self.has_cut_call


class AnswerParser(Protocol):
    """Turns the text of one answer into parts. It holds back only what may still become markup."""

    def feed(self, text: str) -> Sequence[Part]:
        """The parts that are certain after more text."""

    def finish(self, *, is_cut: bool = False) -> Sequence[Part]:
        """What was held back: the answer has ended, by its length or a stop string if it was cut."""


ParserFactory: TypeAlias = Callable[[], AnswerParser]
"""Makes the parser of one answer of a request."""


class AnswerFormat(Protocol):
    """One API's spelling of the answers of one request. Every method gives whole events, or nothing (b"")."""

    def opening(self, choice: int) -> bytes:
        """The events before anything of an answer; asked for once every answer of the request was admitted."""

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


@runtime_checkable
class TextFormat(Protocol):
    """What a format may offer beside: a short way for the deltas that nearly all are, one text and nothing else."""

    def text(self, choice: int, text: str) -> bytes:
        """The same as `delta` of an `AnswerDelta` with this `Text` alone."""
