"""Tokenizer process: one HTTP request (or probe) while it is open, and where its answers go."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import Protocol

from services.tokenizer.answer_parts import TokenLogprobs
from services.tokenizer.api_error import ApiError
from services.tokenizer.journal import AnswerNews, Ending, JournalEntry
from services.wire.answers import HopReport
from services.wire.members import Role


class AnswerSink(Protocol):
    """Where the answers of a request go. Every call returns at once."""

    def add(self, choice: int, news: AnswerNews) -> None:
        """More of one answer."""

    def set_prompt(self, choice: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """The log-probabilities of an answer's prompt, one for each of its tokens."""

    def end(self, choice: int, ending: Ending) -> None:
        """One answer is complete: STOP_TOKEN, STOP_STRING or LENGTH."""

    def fail(self, error: ApiError) -> None:
        """The request cannot be completed; may come more than once, the first counts."""

    def flush(self) -> None:
        """The batch is over: hand on what came."""

    def keep_alive(self, now_s: float) -> None:
        """Called about once a second: a chance to say that the server is still there."""


class OpenRequest:
    """One HTTP request (or probe) and its answers."""

    __slots__ = (
        "admission",
        "admitted_s",
        "entries",
        "failure",
        "gaps_s",
        "received_s",
        "reports",
        "sink",
        "submitted_s",
        "unadmitted",
        "was_refused",
    )

    def __init__(self, entries: list[JournalEntry], sink: AnswerSink, received_s: float) -> None:
        self.entries = entries
        self.sink = sink
        self.received_s = received_s
        self.submitted_s = time.monotonic()
        self.admitted_s = 0.0
        """When the last answer was admitted; 0 before."""
        self.reports: dict[Role, HopReport] = {}
        """What other processes told of its answers so far; the last word of each kind of process."""
        self.gaps_s = array("f")
        """The times between the chunks of its answers."""
        self.unadmitted = {entry.request_id for entry in entries}
        self.failure = ""
        """The code of the error for which the request could not be completed; the first one counts."""
        self.was_refused = False
        """Whether an answer was not taken: then none of it ever began."""
        self.admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when every answer was admitted; an ApiError when one was refused or the request failed before that."""

    def admit(self, request_id: bytes) -> None:
        """One answer was taken by the scheduler."""
        self.unadmitted.discard(request_id)
        if not self.unadmitted and not self.admission.done():
            self.admitted_s = time.monotonic()
            self.admission.set_result(None)

    def refuse(self, error: ApiError) -> None:
        """An answer was not taken: the request fails as a whole."""
        self.was_refused = True
        self.fail(error)

    def fail(self, error: ApiError) -> None:
        """Ends the request; its owner closes it."""
        self.failure = self.failure or error.code
        if not self.admission.done():
            self.admission.set_exception(error)
            self.admission.exception()  # whoever waits gets it; nobody may be waiting any more
        self.sink.fail(error)
