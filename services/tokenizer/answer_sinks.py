"""Tokenizer process: the two ends of a request: answers collected for a body, or events written as text comes.

An event stream owns what its client has not taken yet. While the connection is blocked, text is merged per answer, so
that a slow client gets fewer and larger events and nobody waits for it; what it may leave lying is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from services.tokenizer.answer_parts import (
    AnswerDelta,
    AnswerEnd,
    AnswerFormat,
    Part,
    Text,
    TextFormat,
    TokenLogprobs,
    ToolCallArguments,
    ToolCallStart,
)
from services.tokenizer.api_error import ApiError, internal_error, name_grammar
from services.tokenizer.journal import AnswerNews, Ending
from services.tokenizer.pending_answer import PendingAnswer

MAX_PENDING_CHARACTERS = 1 << 20
KEEP_ALIVE_S = 10.0

logger = logging.getLogger(__name__)


class CollectedAnswers:
    """The answers of a request that is not streamed."""

    def __init__(self, answers: Sequence[PendingAnswer]) -> None:
        self._answers = answers
        self._endings: dict[int, Ending] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when every answer has ended; an ApiError when the request failed."""

    def add(self, choice: int, news: AnswerNews) -> None:
        """More of an answer."""
        self._answers[choice].add(news)

    def set_prompt(self, choice: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """The log-probabilities of an answer's prompt."""
        self._answers[choice].set_prompt(logprobs)

    def end(self, choice: int, ending: Ending) -> None:
        """One answer is complete."""
        self._endings[choice] = ending
        if len(self._endings) == len(self._answers) and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: ApiError) -> None:
        """The request failed."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # whoever waits gets it; nobody may be waiting any more

    def flush(self) -> None:
        """Nothing goes out before the end."""

    def keep_alive(self, now_s: float) -> None:
        """A body cannot begin before its status is known."""

    def take(self, timings: Mapping[str, object] | None = None) -> tuple[list[list[AnswerDelta]], list[AnswerEnd]]:
        """What each answer came in, and its end, once they are `done`; the last end has the timings."""
        deltas: list[list[AnswerDelta]] = []
        ends: list[AnswerEnd] = []
        for choice, answer in enumerate(self._answers):
            found = (answer.opening, answer.take_last(is_cut=self._endings[choice].is_cut))
            deltas.append([delta for delta in found if delta is not None])
            is_last = choice == len(self._answers) - 1
            ends.append(answer.take_end(self._endings[choice], timings if is_last else None))
        return deltas, ends


class EventOutput(Protocol):
    """The connection of an event stream."""

    @property
    def is_blocked(self) -> bool:
        """Whether the client has left so much lying that nothing more is to be written now."""

    def write(self, data: bytes) -> None:
        """Hands over bytes of events; never waits. On a closed connection they go nowhere."""

    def cut(self) -> None:
        """Ends the connection at once."""


Told: TypeAlias = Callable[[], Mapping[str, object] | None]


def _nothing() -> Mapping[str, object] | None:
    return None


@dataclass
class StreamOptions:
    """What a stream tells beside its answers.

    Attributes:
        usage: The usage so far.
        timings: The timings at the end; None for none.
        has_continuous_usage: Whether every delta has the usage so far.
        event_id: What the ids of events begin with; "" for no `id:` lines.
        grammar_param: The field that an error about the grammar names.
    """

    usage: Told = _nothing
    timings: Told = _nothing
    has_continuous_usage: bool = False
    event_id: str = ""
    grammar_param: str | None = None


class EventStream:
    """The events of one streamed request, from the opening ones to the ending."""

    def __init__(self, answer_format: AnswerFormat, answers: Sequence[PendingAnswer]) -> None:
        """Nothing is written before `open`.

        Args:
            answer_format: Makes the events.
            answers: One for each answer.
        """
        self._options = StreamOptions()
        self._tells_more = False
        self.failure: ApiError | None = None
        """The error that ends the stream."""
        self.done: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        """Done when the last event was handed over: None, or the error that the stream ended with."""
        self._format = answer_format
        self._text = answer_format.text if isinstance(answer_format, TextFormat) else self._spell_text
        self._answers = answers
        self._only_text = answers[0] if len(answers) == 1 and answers[0].is_plain else None
        self._endings: dict[int, Ending] = {}
        self._touched = {choice: None for choice, answer in enumerate(answers) if answer.opening is not None}
        self._num_open = len(answers)
        self._num_pending = 0
        self._num_shown = [0] * len(answers)
        self._output: EventOutput | None = None
        self._last_write_s = 0.0

    def tell(self, options: StreamOptions) -> None:
        """What goes out beside the answers; before anything of them has come."""
        self._options = options
        self._tells_more = options.has_continuous_usage or bool(options.event_id)
        if self._tells_more:
            self._only_text = None

    def open(self, output: EventOutput) -> None:
        """The head of the response is out: events may follow."""
        self._output = output
        self._last_write_s = time.monotonic()  # the head counts: a completion's first chunk is its first token
        self._write(b"".join(self._format.opening(choice) for choice in range(len(self._answers))))
        self.flush()

    def add(self, choice: int, news: AnswerNews) -> None:
        """More of an answer."""
        answer, text = self._answers[choice], news.text
        if not answer.is_plain:
            answer.add(news)
        elif text:  # nearly always
            answer.texts.append(text)
        self._touched[choice] = None
        self._num_pending += len(text)

    def set_prompt(self, choice: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """The log-probabilities of an answer's prompt: what waited for them can go out."""
        self._answers[choice].set_prompt(logprobs)
        self._touched[choice] = None

    def end(self, choice: int, ending: Ending) -> None:
        """One answer is complete."""
        self._endings[choice] = ending
        self._touched[choice] = None
        self._num_open -= 1

    def fail(self, error: ApiError) -> None:
        """The request failed: what came until now goes out, then the error, then the end."""
        if self.failure is None and self._num_open:
            name_grammar(error, self._options.grammar_param)
            self.failure = error
            self.flush()

    def flush(self) -> None:
        """Writes all that is pending, in one piece, unless the client is behind."""
        output = self._output
        if output is None or self.done.done():
            return
        if output.is_blocked:
            if self._num_pending > MAX_PENDING_CHARACTERS:
                output.cut()
            return
        data = self._take_pending()
        is_over = self.failure is not None or not self._num_open
        if is_over:
            data += self._ending()
        self._write(data)
        if is_over:
            self.done.set_result(self.failure)

    def keep_alive(self, now_s: float) -> None:
        """Writes a comment if nothing was written for a while."""
        output = self._output
        is_due = now_s - self._last_write_s >= KEEP_ALIVE_S
        if is_due and output is not None and not output.is_blocked and not self.done.done():
            self._write(self._format.keep_alive())

    def _take_pending(self) -> bytes:
        self._num_pending = 0
        try:
            answer = self._only_text
            if answer is not None and answer.opening is None and not self._endings:  # nearly always
                self._touched.clear()
                return self._text(0, answer.take_text()) if answer.texts else b""
            touched, self._touched = self._touched, {}
            return b"".join(self._events_of(touched))
        except Exception:  # a fault in a parser or a format is this request's own
            self.failure = internal_error()
            logger.exception("a stream breaks off: %s", self.failure.message)
            return b""

    def _events_of(self, choices: Iterable[int]) -> list[bytes]:
        is_text_alone = not self._tells_more and not self._endings  # nearly always
        events: list[bytes] = []
        for choice in choices:
            answer = self._answers[choice]
            if not (is_text_alone and answer.is_plain and answer.opening is None):
                events.append(self._all_events_of(choice, answer))
            elif answer.texts:
                events.append(self._text(choice, answer.take_text()))
        return events

    def _spell_text(self, choice: int, text: str) -> bytes:
        return self._format.delta(choice, AnswerDelta((Text(text),)))

    def _all_events_of(self, choice: int, answer: PendingAnswer) -> bytes:
        events = b""
        if answer.opening is not None and not answer.awaits_prompt:
            opening, answer.opening = answer.opening, None
            events = self._named(choice, self._format.delta(choice, opening))
        ending = self._endings.pop(choice, None) if self._endings else None
        options = self._options
        usage = options.usage() if options.has_continuous_usage else None
        delta = answer.take(usage) if ending is None else answer.take_last(usage, is_cut=ending.is_cut)
        if delta is not None:
            events += self._named(choice, self._format.delta(choice, delta), delta)
        if ending is not None:
            is_last = not self._num_open and not self._endings
            timings = options.timings() if is_last else None
            events += self._named(choice, self._format.finish(choice, answer.take_end(ending, timings, usage)))
        return events

    def _named(self, choice: int, events: bytes, delta: AnswerDelta | None = None) -> bytes:
        """The events, with the place that they take a reader to if it wants to know: how much of each answer it has."""
        if not self._options.event_id or not events:
            return events
        if delta is not None:
            self._num_shown[choice] += num_shown(delta)
        return with_event_id(events, f"{self._options.event_id}/{'-'.join(map(str, self._num_shown))}")

    def _ending(self) -> bytes:
        if self.failure is not None:
            return self._format.error(self.failure)
        return self._format.ending(self._options.usage() or {})

    def _write(self, data: bytes) -> None:
        if data and self._output is not None:
            self._output.write(data)
            self._last_write_s = time.monotonic()


def num_shown(delta: AnswerDelta) -> int:
    """How far a delta takes an answer on, however it is cut: characters of its parts, and one for each call begun."""
    return sum(_num_characters(part) for part in delta.parts)


def _num_characters(part: Part) -> int:
    match part:
        case ToolCallStart():
            return 1
        case ToolCallArguments(_, fragment):
            return len(fragment)
        case _:
            return len(part.text)


def with_event_id(events: bytes, event_id: str) -> bytes:
    """The same events; the last of them has the id, so that a stream cut between them repeats rather than loses."""
    start = events.rfind(b"\n\n", 0, -2) + 2 if b"\n\n" in events[:-2] else 0
    return b"%bid: %b\n%b" % (events[:start], event_id.encode(), events[start:])
