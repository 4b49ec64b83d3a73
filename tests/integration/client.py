"""A running server as its clients see it, for tests: requests by hand, streams held to their form, numbers read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from tests.unit.tokenizer.http_client import Connection, EventReader, Response, text_of

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

# The prompts whose greedy continuations are known beforehand, with a gap that no rounding closes.
NUM = "1, 2, 3, 4,"
NUM_TEXT = " 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, "
HELLO = "hello world hello world hello world hello world hello"
WAVE = "👋🌍" * 5
BAD = "🙂" * 8

# A chat of the one user turn `Hi`, as ids.
CHAT_HI_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
    1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip
HI = [{"role": "user", "content": "Hi"}]

PATIENCE_S = 240.0  # for one answer on a machine that does other things too


class Running(Protocol):
    """Processes that serve."""

    url: str

    def has_ended(self, within_s: float) -> bool:
        """Whether one of them ends within this time; waits for it."""


class PatientReader(EventReader):
    """Reads events; comments that fill a long wait are passed over."""

    def next(self) -> str:
        while (event := super().next()).startswith(":"):
            pass
        return event


@dataclass(frozen=True)
class Answer:
    """What a request got, choice by choice; `pieces` are the texts of a stream's chunks."""

    texts: list[str]
    finish_reasons: list[str]
    usage: Json
    headers: dict[str, str]
    pieces: list[list[str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def finish_reason(self) -> str:
        return self.finish_reasons[0]

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def completion_tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def outcome(self) -> tuple[list[str], list[str], int, int]:
        """What must be the same however the answer is asked for."""
        return self.texts, self.finish_reasons, self.prompt_tokens, self.completion_tokens


@dataclass(frozen=True)
class Client:
    """Asks one server."""

    server: Running

    @property
    def port(self) -> int:
        port = urlsplit(self.server.url).port
        assert port is not None
        return port

    def connect(self, receive_buffer: int = 0) -> Connection:
        """A connection whose reads wait long."""
        connection = Connection(self.port, receive_buffer)
        connection.sock.settimeout(PATIENCE_S)
        return connection

    def request(self, method: str, path: str, body: object = None, **headers: str) -> Response:
        """One request on a connection of its own."""
        with self.connect() as connection:
            connection.send(method, path, body, **headers)
            return connection.read_response()

    def ask(self, path: str, **body: object) -> Answer:
        """A request that is not streamed, temperature 0 unless told otherwise; it must succeed."""
        response = self.request("POST", path, {"temperature": 0, **body})
        assert response.status == 200, response.body
        whole = response.json()
        assert [choice["index"] for choice in whole["choices"]] == list(range(len(whole["choices"])))
        usage = whole["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in whole["choices"]]
        return Answer(texts, [choice["finish_reason"] for choice in whole["choices"]], usage, response.headers)

    def stream(self, path: str, **body: object) -> Answer:
        """The same as a stream, with its usage; holds the form of the events while reading them."""
        with self.connect() as connection:
            connection.send("POST", path, streamed(body))
            reader = PatientReader(connection)
            assert reader.status == 200
            return read_stream(reader)

    def ask_both(self, path: str, **body: object) -> Answer:
        """Asks once whole and once as a stream, which must say the same."""
        whole, stream = self.ask(path, **body), self.stream(path, **body)
        assert stream.outcome == whole.outcome
        return stream

    def refused(self, path: str, body: object, status: int = 400, **headers: str) -> Json:
        """A request that must be refused with this status; the error object."""
        response = self.request("POST", path, body, **headers)
        assert response.status == status, response.body
        return response.error

    @contextmanager
    def open_stream(self, path: str, **body: object) -> Iterator[EventReader]:
        """A stream to be read by hand."""
        with self.connect() as connection:
            connection.send("POST", path, streamed(body))
            yield PatientReader(connection)

    def metric(self, name: str, role: str) -> float:
        """A sample of /metrics: a process's own numbers, as of its last heartbeat."""
        prefix, label = f"tokenway:{name}{{", f'role="{role}"'
        lines = self.request("GET", "/metrics").body.decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(prefix) and label in line)

    def scheduler(self, name: str) -> float:
        return self.metric(f"scheduler_{name}", "scheduler")

    def wait_until(self, condition: Callable[[], bool], within_s: float = 120) -> None:
        """Asks until the answer is yes; fails when the server ends or the time is over."""
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, "waited too long"
            assert not self.server.has_ended(within_s=0.1), "the server has ended"

    def settle(self) -> None:
        """Lets the heartbeats, two a second, bring the numbers of all processes up to date."""
        assert not self.server.has_ended(within_s=1.5), "the server has ended"

    def wait_for_load(self, running: int, waiting: int) -> None:
        """Waits until so many requests run and wait."""
        self.wait_until(
            lambda: (
                (self.scheduler("num_requests_running"), self.scheduler("num_requests_waiting")) == (running, waiting)
            )
        )

    def wait_idle(self) -> None:
        """Waits until nothing is open anywhere and every page is free or cached."""
        self.settle()
        self.wait_for_load(0, 0)
        self.wait_until(lambda: self.scheduler("num_requests_retracted") == 0)
        self.wait_until(
            lambda: self.scheduler("kv_pages_free") + self.scheduler("kv_pages_cached") == self.scheduler("kv_pages")
        )
        self.wait_until(lambda: self.metric("detokenizer_open_answers", "detokenizer") == 0)
        self.wait_until(lambda: self.metric("tokenizer_open_answers", "tokenizer") == 0)


def streamed(body: Json) -> Json:
    """The body of a stream that tells its usage."""
    return {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}


def read_stream(reader: EventReader) -> Answer:
    """Reads a stream to its end: text chunks, for each choice one chunk with the reason alone, then the usage."""
    *events, last = reader.rest()
    assert last["choices"] == []
    num_choices = 1 + max(choice["index"] for event in events for choice in event["choices"])
    pieces: list[list[str]] = [[] for _ in range(num_choices)]
    reasons: dict[int, str] = {}
    for event in events:
        assert (event["id"], event["model"], event["created"]) == (last["id"], last["model"], last["created"])
        [choice] = event["choices"]
        index, text = choice["index"], choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        assert index not in reasons, "a chunk after the last one"
        if choice["finish_reason"] is not None:
            assert text == ""
            reasons[index] = choice["finish_reason"]
        elif "role" not in choice.get("delta", {}):
            assert text, "an empty chunk"
            pieces[index].append(text)
    texts = ["".join(parts) for parts in pieces]
    assert texts == [text_of(events, index) for index in range(num_choices)]
    return Answer(texts, [reasons[index] for index in range(num_choices)], last["usage"], reader.headers, pieces)


def all_at_once(calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Makes all calls at the same time; their answers in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
