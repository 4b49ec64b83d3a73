"""A connection against a list of what was sent on it: however bytes are cut, each request has one answer, its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import uvloop
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.connection_limits import ConnectionLimits
from services.tokenizer.http_connection import ClientConnection
from services.tokenizer.http_server import HttpServer
from tests.sockets import DEADLINE_S

LIMITS = ConnectionLimits(
    head_timeout_s=60,
    write_timeout_s=60,
    max_headers=20,
    max_header_bytes=500,
    max_head_bytes=1000,
    max_body_bytes=9000,
)
READS, ANSWERS_EARLY = "reads", "early"
NOT_HTTP = ("400", "")


@dataclass(frozen=True)
class Sent:
    """A request; `body` None for none, `is_chunked` for one in chunks."""

    path: str
    body: bytes | None
    is_chunked: bool

    def raw(self, number: int) -> bytes:
        head = b"%s /%s/%d HTTP/1.1\r\nHost: x\r\n" % (
            b"GET" if self.body is None else b"POST",
            self.path.encode(),
            number,
        )
        if self.body is None:
            return head + b"\r\n"
        if not self.is_chunked:
            return head + b"Content-Length: %d\r\n\r\n%b" % (len(self.body), self.body)
        half = len(self.body) // 2
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (self.body[:half], self.body[half:]) if part)
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"

    def answer(self, number: int) -> tuple[str, str]:
        return (
            "200" if self.path == READS else "404",
            f"{number}:{len(self.body or b'') if self.path == READS else '-'}",
        )


@dataclass(frozen=True)
class Conversation:
    """Requests, then something that is none; `cuts`: where the sender pauses, for so many turns of the loop."""

    requests: Sequence[Sent]
    ending: bytes
    cuts: Sequence[int]
    turns: int

    def pieces(self) -> list[bytes]:
        raw = b"".join(one.raw(number) for number, one in enumerate(self.requests)) + self.ending
        places = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in self.cuts)})
        return [raw[start:end] for start, end in pairwise(places)]

    def answers(self) -> list[tuple[str, str]]:
        found = [one.answer(number) for number, one in enumerate(self.requests)]
        return [*found, NOT_HTTP] if self.ending.strip() else found


class WatchedConnection(ClientConnection):
    """Says how many bytes have reached it."""

    __slots__ = ("num_received",)
    num_received: int

    def data_received(self, data: bytes) -> None:
        self.num_received += len(data)
        super().data_received(data)


class WatchedServer(HttpServer):
    def __call__(self) -> WatchedConnection:
        connection = WatchedConnection(self, asyncio.get_running_loop(), LIMITS, self.counts, False)
        connection.num_received = 0
        return connection


async def handle(request: web.BaseRequest) -> web.StreamResponse:
    """Tells the request's number, and of a body that it reads the length."""
    _, path, number = request.path.split("/")
    if path == ANSWERS_EARLY:
        return web.Response(status=404, text=f"{number}:-")
    try:
        return web.Response(text=f"{number}:{len(await request.read())}")
    except RequestPayloadError:
        return web.Response(status=400, text=f"{number}:broken")


@dataclass
class Heard:
    """What the server has sent."""

    data: bytes = b""
    has_ended: bool = False
    answers: list[tuple[str, str]] = field(default_factory=list)
    last_head: bytes = b""

    async def listen(self, client: socket.socket) -> None:
        while data := await asyncio.get_running_loop().sock_recv(client, 65536):
            self.data += data
            self._take_answers()
        self.has_ended = True

    def _take_answers(self) -> None:
        while b"\r\n\r\n" in self.data:
            head, rest = self.data.split(b"\r\n\r\n", 1)
            lines = head.split(b"\r\n")
            assert lines[0].startswith((b"HTTP/1.0 ", b"HTTP/1.1 ")), lines[0]
            [size] = [int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")]
            if len(rest) < size:
                return
            body, self.data, self.last_head = rest[:size], rest[size:], head.lower()
            status = lines[0].split()[1].decode()
            self.answers.append((status, body.decode() if body[:1].isdigit() else ""))

    @property
    def says_close(self) -> bool:
        return b"connection: close" in self.last_head or self.last_head.startswith(b"http/1.0")


async def hold(conversation: Conversation, num_answers: int) -> Heard:
    """Sends it piece by piece; what came back until that many answers were there, or the server ended the connection.

    A while longer is listened for what else it might say.
    """
    loop = asyncio.get_running_loop()
    server = WatchedServer(handle, LIMITS, lambda request: {})
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        _, connection = await loop.connect_accepted_socket(server, theirs)
        heard = Heard()
        listening = loop.create_task(heard.listen(ours))
        num_sent = 0
        async with asyncio.timeout(DEADLINE_S):
            for piece in conversation.pieces():
                await loop.sock_sendall(ours, piece)
                num_sent += len(piece)
                while connection.num_received < num_sent:
                    await asyncio.sleep(0)  # until the server has read it
                for _ in range(conversation.turns):
                    await asyncio.sleep(0)  # so many turns of the loop are what is tried
            while not heard.has_ended and len(heard.answers) < num_answers:
                await asyncio.sleep(0)  # until all answers are here
            for _ in range(40):
                await asyncio.sleep(0)  # turns in which an answer too many would come
            ours.shutdown(socket.SHUT_WR)
            await listening
    await server.shutdown(1)
    return heard


SENT = st.builds(
    Sent,
    path=st.sampled_from([READS, READS, ANSWERS_EARLY]),
    body=st.none() | st.binary(min_size=1, max_size=40) | st.just(b"x" * 3000),
    is_chunked=st.booleans(),
)
ENDINGS = st.sampled_from(
    [
        b"",
        b"\r\n",
        b"GARBAGE\r\n\r\n",
        b"xyz",
        b"FOO / HTTP/1.1\r\n\r\n",
        b"GET /reads/9\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"\x16\x03\x01\x02",
    ]
)
CONVERSATIONS = st.builds(
    Conversation,
    requests=st.lists(SENT, max_size=5),
    ending=ENDINGS,
    cuts=st.lists(st.integers(0, 20_000), max_size=6),
    turns=st.integers(0, 6),
)


@given(CONVERSATIONS)
@settings(max_examples=300, deadline=None)
def test_each_request_has_one_answer_and_what_is_none_has_one_behind_them(conversation: Conversation) -> None:
    expected = conversation.answers()
    heard = uvloop.run(hold(conversation, len(expected)))
    assert heard.data == b""
    assert heard.answers == expected[: len(heard.answers)]
    if len(heard.answers) < len(expected):  # only an answer that came before its request's body may be the last
        last = conversation.requests[len(heard.answers) - 1]
        assert last.path == ANSWERS_EARLY
        assert last.body is not None
        assert heard.says_close


@given(CONVERSATIONS, st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_a_request_that_is_cut_off_has_no_wrong_answer(conversation: Conversation, num_missing: int) -> None:
    whole = b"".join(conversation.pieces())
    kept = Conversation([], whole[: max(0, len(whole) - num_missing)], conversation.cuts, conversation.turns)
    heard = uvloop.run(hold(kept, 0))
    assert heard.data == b""
    assert heard.answers == conversation.answers()[: len(heard.answers)]
