"""Tokenizer process: the two ends of a request: a body made at the end, or events written as text comes.

An event stream owns what its client has not taken yet. While the connection is blocked, text is merged per answer, so
that a slow client gets fewer and larger events and nobody waits for it; what it may leave lying is bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from services.tokenizer.api_error import ApiError
from services.tokenizer.sse import DONE, KEEP_ALIVE, ChunkWriter, error_event
from services.wire.messages import Finish

MAX_PENDING_CHARACTERS = 1 << 20
KEEP_ALIVE_S = 10.0


class CollectedAnswers:
    """The texts of answers that are not streamed."""

    def __init__(self, num_answers: int) -> None:
        self._texts: list[list[str]] = [[] for _ in range(num_answers)]
        self._num_open = num_answers
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when every answer has ended; an ApiError when the request failed."""

    @property
    def texts(self) -> list[str]:
        """The text of each answer so far."""
        return ["".join(parts) for parts in self._texts]

    def add(self, choice: int, text: str) -> None:
        """More text."""
        self._texts[choice].append(text)

    def end(self, choice: int, finish: Finish) -> None:
        """One answer is complete."""
        self._num_open -= 1
        if not self._num_open and not self.done.done():
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


class EventOutput(Protocol):
    """The connection of an event stream."""

    @property
    def is_blocked(self) -> bool:
        """Whether the client has left so much lying that nothing more is to be written now."""

    def write(self, data: bytes) -> None:
        """Hands over bytes of events; never waits. On a closed connection they go nowhere."""

    def cut(self) -> None:
        """Ends the connection at once."""


class EventStream:
    """The events of one streamed request, from the opening chunk to [DONE]."""

    def __init__(self, chunks: ChunkWriter, echoes: Sequence[str]) -> None:
        """Nothing is written before `open`.

        Args:
            chunks: Makes the events.
            echoes: What each answer begins with, for most nothing.
        """
        self._chunks = chunks
        self._texts: list[list[str]] = [[text] if text else [] for text in echoes]
        self._finishes: dict[int, Finish] = {}
        self._touched = {choice: None for choice, text in enumerate(echoes) if text}
        self._num_open = len(echoes)
        self._num_pending = 0
        self.failure: ApiError | None = None
        """The error that ends the stream."""
        self._output: EventOutput | None = None
        self._last_write_s = 0.0
        self.usage: Callable[[], dict[str, object]] | None = None
        """Gives the usage at the end, for a usage chunk; None for no such chunk."""
        self.done: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        """Done when the last event was handed over: None, or the error that the stream ended with."""

    def open(self, output: EventOutput) -> None:
        """The head of the response is out: events may follow."""
        self._output = output
        self._last_write_s = time.monotonic()  # the head counts: a completion's first chunk is its first token
        self._write(b"".join(self._chunks.opening(choice) for choice in range(len(self._texts))))
        self.flush()

    def add(self, choice: int, text: str) -> None:
        """More text of an answer."""
        self._texts[choice].append(text)
        self._touched[choice] = None
        self._num_pending += len(text)

    def end(self, choice: int, finish: Finish) -> None:
        """One answer is complete."""
        self._finishes[choice] = finish
        self._touched[choice] = None
        self._num_open -= 1

    def fail(self, error: ApiError) -> None:
        """The request failed: what came until now goes out, then the error, then the end."""
        if self.failure is None and self._num_open:
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
            self._write(KEEP_ALIVE)

    def _take_pending(self) -> bytes:
        events: list[bytes] = []
        for choice in self._touched:
            texts = self._texts[choice]
            if texts:
                events.append(self._chunks.text(choice, texts[0] if len(texts) == 1 else "".join(texts)))
                texts.clear()
            finish = self._finishes.pop(choice, None)
            if finish is not None:
                events.append(self._chunks.finish(choice, finish))
        self._touched.clear()
        self._num_pending = 0
        return b"".join(events)

    def _ending(self) -> bytes:
        if self.failure is not None:
            return error_event(self.failure) + DONE
        usage = self._chunks.usage(self.usage()) if self.usage is not None else b""
        return usage + DONE

    def _write(self, data: bytes) -> None:
        if data and self._output is not None:
            self._output.write(data)
            self._last_write_s = time.monotonic()
