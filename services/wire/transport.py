"""Sockets between processes: a bound ROUTER with many peers, a DEALER connected to one.

Sending never blocks. What ZeroMQ will not take at once waits in a bounded outbox per peer and goes out in order before
anything newer. What an absent peer had been handed is lost on every ZeroMQ pattern: cursors and `Resend` are the
guarantee, not the socket. When an outbox is full the peer is treated as lost: `send` says False and the caller acts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from services.wire.codec import decode, encode
from services.wire.endpoints import EndpointClaim
from services.wire.errors import EndpointInUseError, ProtocolError
from services.wire.forms import MAX_FRAME_BYTES

_HIGH_WATER_MARK = 2048
_MAX_OUTBOX_FRAMES = 8192
_RETRY_MS = 5  # how soon a non-empty outbox is tried again: a ROUTER cannot tell which peer became writable
_BATCH = 512

logger = logging.getLogger(__name__)


@dataclass
class PortStats:
    """What went through a port. Counters only grow; `outbox_frames` is the present depth."""

    received: int = 0
    received_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0
    rejected: int = 0
    undeliverable: int = 0
    outbox_frames: int = 0


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message, and the routing id of the peer it came from (b"" on a DEALER)."""

    peer: bytes
    message: object


class Port:
    """One socket. Use `RouterPort` or `DealerPort`."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._outboxes: dict[bytes, deque[bytes]] = {}
        self.stats = PortStats()
        self.after_send: Callable[[], None] | None = None
        """Called after each send: a send can swallow the edge of the readable event (see AsyncReceiver)."""

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket underneath, for polling."""
        return self._socket

    @property
    def file_descriptor(self) -> int:
        """ZeroMQ's edge-triggered descriptor: readable means "look again"."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self) -> None:
        """Closes the socket at once (linger 0)."""
        self._socket.close(linger=0)

    def receive_ready(self, most: int = _BATCH) -> list[Envelope]:
        """The messages that are there now, at most `most`; never waits. Bad frames are counted, logged and dropped."""
        self.flush()
        envelopes: list[Envelope] = []
        for _ in range(most):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            peer, payload = (frames[0], frames[1:]) if self._is_router else (b"", frames)
            try:
                if len(payload) != 1:
                    raise ProtocolError(f"{len(payload)} frames instead of one")
                envelopes.append(Envelope(peer, decode(payload[0])))
            except ProtocolError as error:
                self.stats.rejected += 1
                logger.warning("dropped a frame of %d bytes from %r: %s", sum(map(len, payload)), peer, error)
                continue
            self.stats.received += 1
            self.stats.received_bytes += len(payload[0])
        return envelopes

    def flush(self) -> None:
        """Hands what waits in the outboxes to ZeroMQ, as far as it takes it."""
        for peer in list(self._outboxes):
            outbox = self._outboxes[peer]
            while outbox:
                sent = self._try_send(peer, outbox[0])
                if sent is False:
                    break
                outbox.popleft()
                self.stats.outbox_frames -= 1
            if not outbox:
                del self._outboxes[peer]

    @property
    def has_outbox(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outboxes)

    def forget(self, peer: bytes) -> None:
        """Drops what waits for a peer that is gone."""
        self.stats.outbox_frames -= len(self._outboxes.pop(peer, ()))

    def _send(self, peer: bytes, item: object) -> bool:
        frame = encode(item)
        if len(frame) > MAX_FRAME_BYTES:
            raise ProtocolError(f"{type(item).__name__} of {len(frame)} bytes is over the frame limit")
        outbox = self._outboxes.get(peer)
        if outbox is None:
            sent = self._try_send(peer, frame)
            if sent is not False:
                return sent is True
            outbox = self._outboxes[peer] = deque()
        if len(outbox) >= _MAX_OUTBOX_FRAMES:
            self.stats.undeliverable += 1
            return False
        outbox.append(frame)
        self.stats.outbox_frames += 1
        return True

    def _try_send(self, peer: bytes, frame: bytes) -> bool | None:
        """True: sent. False: not now. None: the peer is not there."""
        try:
            self._socket.send_multipart([peer, frame] if self._is_router else [frame], zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.stats.undeliverable += 1
            return None
        self.stats.sent += 1
        self.stats.sent_bytes += len(frame)
        if self.after_send is not None:
            self.after_send()
        return True

    @property
    def _is_router(self) -> bool:
        return isinstance(self, RouterPort)


class RouterPort(Port):
    """A bound socket with many peers, addressed by routing id. A send to an absent peer says False."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        """Binds `endpoint`; a tcp endpoint may end in `:0` for any free port.

        Raises:
            EndpointInUseError: somebody else has it, named in the message.
        """
        self._claim = EndpointClaim(endpoint)
        socket = _configured(context, zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(endpoint.replace(":0", ":*") if endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._claim.close()
            raise EndpointInUseError(f"cannot bind {endpoint}: {error.strerror}") from error
        super().__init__(socket)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: bytes, item: object) -> bool:
        """Sends to one peer; False when it is not there or its outbox is full."""
        return self._send(peer, item)

    def close(self) -> None:
        """Closes the socket and gives the endpoint back."""
        super().close()
        self._claim.close()


class DealerPort(Port):
    """A socket connected to one peer. Nothing is queued for a peer that is not connected yet beyond the outbox."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, routing_id: bytes) -> None:
        socket = _configured(context, zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.connect(endpoint)
        super().__init__(socket)
        self.endpoint = endpoint

    def send(self, item: object) -> bool:
        """Sends to the peer, now or as soon as it can take it; False when the outbox is full."""
        return self._send(b"", item)


def _configured(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    return socket


class BlockingReceiver:
    """Waits on ports in a plain loop (scheduler and worker)."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self._ports = list(ports)
        self._poller = zmq.Poller()
        for port in self._ports:
            self._poller.register(port.socket, zmq.POLLIN)

    def receive_batch(self, timeout_s: float) -> list[tuple[Port, Envelope]]:
        """What arrived, after waiting at most `timeout_s` for the first message; 0 does not wait.

        A signal may end the wait early with an empty batch.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            batch = [(port, envelope) for port in self._ports for envelope in port.receive_ready()]
            left_ms = int(1000 * (deadline - time.monotonic()) + 0.999)
            if batch or left_ms <= 0:
                return batch
            waits_to_send = any(port.has_outbox for port in self._ports)
            if not self._poller.poll(min(left_ms, _RETRY_MS) if waits_to_send else left_ms) and not waits_to_send:
                return []


class AsyncReceiver:
    """Waits on ports from one asyncio task (tokenizer and detokenizer), without zmq.asyncio's per-message futures.

    ZeroMQ's file descriptor is edge-triggered: it must be drained after every wake-up, and a send can swallow the edge,
    so each send asks for another look.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._ports: list[Port] = []
        self._interrupted = False

    def add(self, port: Port) -> None:
        """Starts watching a port."""
        self._ports.append(port)
        self._loop.add_reader(port.file_descriptor, self._wake.set)
        port.after_send = self._wake.set
        self._wake.set()

    def remove(self, port: Port) -> None:
        """Stops watching a port; the caller closes it."""
        self._ports.remove(port)
        self._loop.remove_reader(port.file_descriptor)
        port.after_send = None

    def interrupt(self) -> None:
        """Makes a waiting `receive_batch` return now (with what is there, perhaps nothing)."""
        self._interrupted = True
        self._wake.set()

    async def receive_batch(self, timeout_s: float) -> list[tuple[Port, Envelope]]:
        """What arrived, after waiting at most `timeout_s` for the first message."""
        deadline = self._loop.time() + timeout_s
        while True:
            self._wake.clear()
            batch = [(port, envelope) for port in self._ports for envelope in port.receive_ready()]
            left_s = deadline - self._loop.time()
            if batch or left_s <= 0 or self._interrupted:
                self._interrupted = False
                return batch
            if any(port.has_outbox for port in self._ports):
                left_s = min(left_s, _RETRY_MS / 1000)
            timer = self._loop.call_later(left_s, self._wake.set)
            await self._wake.wait()
            timer.cancel()
