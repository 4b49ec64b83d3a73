"""Sends sessions to a server and gathers what comes back: closed loop, or arrivals at random times.

A closed loop keeps a number of sessions going: the next begins when one has ended. With a rate, sessions arrive as a
Poisson process whatever the server does, so that its queue shows; a number beside the rate caps how many go on at once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.launcher.bench.answers import Answer, Expected, read_answer
from services.launcher.bench.sessions import RequestForm, Session
from services.launcher.http.connection import Connection
from services.launcher.http.response import Response, ResponseError
from services.launcher.http.server_address import ServerAddress

_PROGRESS_S = 0.5
_NO_CAP = 2**31


@dataclass(frozen=True)
class Pace:
    """When sessions begin: at most `concurrency` at once (None: no limit), `request_rate` a second (None: at once)."""

    concurrency: int | None
    request_rate: float | None = None
    seed: int = 0

    def arrivals_s(self) -> Iterator[float]:
        """When each session may begin, in seconds from the start; never descending."""
        if self.request_rate is None:
            yield from itertools.repeat(0.0)
            return
        generator = random.Random(f"{self.seed} arrivals")
        now_s = 0.0
        while True:
            yield now_s
            now_s += generator.expovariate(self.request_rate)


@dataclass
class Progress:
    """What a run has got so far, shown on a terminal."""

    num_requests: int
    num_ended: int = 0
    num_events: int = 0
    started_s: float = field(default_factory=time.perf_counter)

    def line(self, now_s: float) -> str:
        """The state in one line."""
        elapsed_s = now_s - self.started_s
        rate = self.num_events / max(elapsed_s, 1e-9)
        return f"{self.num_ended}/{self.num_requests} requests, {rate:.0f} events/s, {elapsed_s:.0f} s"

    async def show(self) -> None:
        """Writes a line over and over until cancelled."""
        while True:
            sys.stderr.write(f"\r\033[K{self.line(time.perf_counter())}")
            sys.stderr.flush()
            await asyncio.sleep(_PROGRESS_S)  # until the next line is due


async def run_sessions(
    address: ServerAddress, form: RequestForm, sessions: Sequence[Session], pace: Pace
) -> tuple[list[Answer], float]:
    """Runs all sessions; their answers in the order of their ends, and the seconds that it took.

    A request that fails is an answer with its failure, and ends its session.
    """
    progress = Progress(sum(len(session.turns) for session in sessions))
    showing = asyncio.create_task(progress.show()) if sys.stderr.isatty() else None
    run = _Run(address, form, progress)
    try:
        await run.all(sessions, pace)
    finally:
        if showing is not None:
            showing.cancel()
            sys.stderr.write("\r\033[K")
        run.close()
    duration_s = run.ended_s - progress.started_s
    return [result.read() if isinstance(result, _Unread) else result for result in run.results], duration_s


@dataclass(frozen=True)
class _Unread:
    """A last answer of a session. Reading events costs as much as receiving them: it is done when all have come."""

    response: Response
    expected: Expected

    def read(self) -> Answer:
        return read_answer(self.response, self.expected)


class _Run:
    """The requests of one run while it goes on."""

    def __init__(self, address: ServerAddress, form: RequestForm, progress: Progress) -> None:
        self._address = address
        self._form = form
        self._progress = progress
        self._idle: list[Connection] = []
        self.results: list[Answer | _Unread] = []
        self.ended_s = progress.started_s

    async def all(self, sessions: Sequence[Session], pace: Pace) -> None:
        room = asyncio.Semaphore(pace.concurrency or _NO_CAP)
        self._progress.started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for session, arrival_s in zip(sessions, pace.arrivals_s(), strict=False):
                wait_s = self._progress.started_s + arrival_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)  # until this session arrives: the load that was asked for
                await room.acquire()
                group.create_task(self._session(session)).add_done_callback(lambda _: room.release())
        self.ended_s = time.perf_counter()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _session(self, session: Session) -> None:
        answers: list[str] = []
        for turn in session.turns:
            expected = self._form.expected(turn)
            try:
                response = await self._request(self._form.body(session, answers))
            except (ResponseError, OSError) as error:
                self._note(Answer(failure=str(error)))
                return
            if len(answers) + 1 == len(session.turns):
                self._note(_Unread(response, expected))
                return
            answer = read_answer(response, expected)
            self._note(answer)
            if answer.failure:
                return
            answers.append(answer.text)

    async def _request(self, body: dict[str, object]) -> Response:
        connection = self._idle.pop() if self._idle else await Connection.open(self._address)
        response = await connection.request("POST", self._form.path, body, self._count)
        self._idle.append(connection)
        return response

    def _note(self, result: Answer | _Unread) -> None:
        self.results.append(result)
        self._progress.num_ended += 1

    def _count(self, time_s: float) -> None:
        self._progress.num_events += 1
