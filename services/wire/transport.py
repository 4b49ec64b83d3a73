"""Sockets between processes: a bound ROUTER with many peers, a DEALER connected to one.

Sending never blocks. What ZeroMQ will not take at once waits in an outbox per peer, bounded in frames and bytes, and
goes out in order before anything newer. What an absent peer had been handed is lost on every ZeroMQ pattern: cursors
and `Resend` are the guarantee, not the socket. When an outbox is full the peer is treated as lost: `send` says False
and the caller acts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from services.wire.codec import decode, encode
from services.wire.endpoints import EndpointClaim
from services.wire.errors import EndpointInUseError, ProtocolError
from services.wire.socket_options import configured_socket

_MAX_OUTBOX_FRAMES = 8192
_MAX_OUTBOX_BYTES = 64 * 1024 * 1024
_RETRY_MS = 5  # how soon a non-empty outbox is tried again: a ROUTER cannot tell which peer became writable
_BATCH = 512
_BATCH_BYTES = 32 * 1024 * 1024
_POLLIN, _NOBLOCK, _MORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # enums compute slowly

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


@dataclass(slots=True)
class _Outbox:
    frames: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0

    def has_room(self, frame: bytes) -> bool:
        return len(self.frames) < _MAX_OUTBOX_FRAMES and (
            not self.frames or self.num_bytes + len(frame) <= _MAX_OUTBOX_BYTES
        )


class Port:
    """One socket. Use `RouterPort` or `DealerPort`."""

    _is_router = False

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._send_frame = super(zmq.Socket, socket).send  # pyzmq's own in Python only adds what drafts need
        self._outboxes: dict[bytes, _Outbox] = {}
        self.stats = PortStats()
        self.look_again: Callable[[], None] | None = None
        """Called when messages may lie here although no edge of the descriptor will tell (see AsyncReceiver)."""

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket underneath, for polling."""
        return self._socket

    @property
    def file_descriptor(self) -> int:
        """ZeroMQ's edge-triggered descriptor: readable means "look again"."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket. What ZeroMQ has taken may still go out for `linger_ms` (as `Context.term` waits)."""
        self._socket.close(linger=linger_ms)

    def receive_ready(self, most: int = _BATCH) -> list[Envelope]:
        """The messages that are there now, at most `most`; never waits. Bad frames are counted, logged and dropped."""
        if self._outboxes:
            self._flush()
        envelopes: list[Envelope] = []
        received_bytes = 0
        socket = self._socket
        has_more = self.has_input()  # far cheaper than a receive in vain
        for _ in range(most):
            if not has_more:
                break
            try:
                peer = socket.recv(_NOBLOCK) if self._is_router else b""
                payload = socket.recv(_NOBLOCK)
            except zmq.Again:
                break
            received_bytes += len(payload)
            has_more = self.has_input()
            try:
                if has_more:  # else nothing can be left of this message either
                    self._require_last_frame()
                envelopes.append(Envelope(peer, decode(payload)))
            except ProtocolError as error:
                self._reject(peer, len(payload), error)
            if received_bytes >= _BATCH_BYTES:
                self._look_again()
                break
        else:
            self._look_again()
        self.stats.received += len(envelopes)
        self.stats.received_bytes += received_bytes
        return envelopes

    def has_input(self) -> bool:
        """Whether a message is here. Takes the edge of the descriptor, as asking for zmq.EVENTS would."""
        return bool(zmq.zmq_poll([(self._socket, _POLLIN)], 0))

    def flush(self) -> None:
        """Hands what waits in the outboxes to ZeroMQ, as far as it takes it."""
        self._flush()
        self._look_again()

    @property
    def has_outbox(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outboxes)

    def outbox_depths(self) -> dict[bytes, int]:
        """Frames that wait, for each peer that some wait for (the only peer of a connected socket is b"")."""
        return {peer: len(outbox.frames) for peer, outbox in self._outboxes.items()}

    def forget(self, peer: bytes) -> None:
        """Drops what waits for a peer that is gone."""
        outbox = self._outboxes.pop(peer, None)
        if outbox is not None:
            self.stats.outbox_frames -= len(outbox.frames)

    def _require_last_frame(self) -> None:
        if not self._socket.getsockopt(zmq.RCVMORE):
            return
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(zmq.NOBLOCK)
        raise ProtocolError("several frames instead of one")

    def _reject(self, peer: bytes, num_bytes: int, error: ProtocolError) -> None:
        self.stats.rejected += 1
        if self.stats.rejected.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...: a flood does not fill the log
            message = "dropped a frame of %d bytes from %r: %s (%d so far)"
            logger.warning(message, num_bytes, peer, error, self.stats.rejected)

    def _send(self, peer: bytes, item: object, can_wait: bool = True) -> bool:
        frame = encode(item)
        try:
            outbox = self._outboxes.get(peer)
            if outbox is None:
                is_sent = self._try_send(peer, frame)
                if is_sent is not False:
                    return is_sent is True
                outbox = _Outbox()
            if not can_wait or not outbox.has_room(frame):
                self.stats.undeliverable += 1
                return False
            self._outboxes[peer] = outbox
            outbox.frames.append(frame)
            outbox.num_bytes += len(frame)
            self.stats.outbox_frames += 1
            return True
        finally:
            if self.look_again is not None:
                self.look_again()

    def _flush(self) -> None:
        for peer, outbox in list(self._outboxes.items()):
            while outbox.frames:
                is_sent = self._try_send(peer, outbox.frames[0])
                if is_sent is False:
                    break
                outbox.num_bytes -= len(outbox.frames.popleft())
                self.stats.outbox_frames -= 1
            if not outbox.frames:
                del self._outboxes[peer]

    def _try_send(self, peer: bytes, frame: bytes) -> bool | None:
        """True: sent. False: not now. None: the peer is not there."""
        try:
            if self._is_router:
                self._send_frame(peer, _MORE)  # once it has taken this, it takes the frame too
            self._send_frame(frame, _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.stats.undeliverable += 1
            return None
        self.stats.sent += 1
        self.stats.sent_bytes += len(frame)
        return True

    def _look_again(self) -> None:
        if self.look_again is not None:
            self.look_again()


class RouterPort(Port):
    """A bound socket with many peers, addressed by routing id. A send to an absent peer says False."""

    _is_router = True

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        """Binds `endpoint`; a tcp endpoint may end in `:0` for any free port.

        Raises:
            EndpointInUseError: it cannot be bound, most often because somebody else has it; named in the message.
        """
        self._claim = EndpointClaim(endpoint)
        socket = configured_socket(context, zmq.ROUTER, endpoint)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            listener = self._claim.listen()
            if listener is not None:
                socket.setsockopt(zmq.USE_FD, listener)
            socket.bind(f"{endpoint[:-1]}*" if endpoint.startswith("tcp://") and endpoint.endswith(":0") else endpoint)
        except (OSError, zmq.ZMQError) as error:
            socket.close(linger=0)
            self._claim.close()
            raise EndpointInUseError(f"cannot bind {endpoint}: {error.strerror}") from error
        super().__init__(socket)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: bytes, item: object) -> bool:
        """Sends to one peer, now or as soon as it can take it; False when it is not there or its outbox is full."""
        return self._send(peer, item)

    def send_now(self, peer: bytes, item: object) -> bool:
        """Sends to one peer if it can take it at once, else drops it: for what is worthless later (heartbeats)."""
        return self._send(peer, item, can_wait=False)

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket and gives the endpoint back."""
        super().close(linger_ms)
        self._claim.close()


class DealerPort(Port):
    """A socket connected to one peer. Nothing is queued for a peer that is not connected yet beyond the outbox."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, routing_id: bytes) -> None:
        socket = configured_socket(context, zmq.DEALER, endpoint)
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

    def send_now(self, item: object) -> bool:
        """Sends to the peer if it can take it at once, else drops it: for what is worthless later (heartbeats)."""
        return self._send(b"", item, can_wait=False)


class BlockingReceiver:
    """Waits on ports in a plain loop (scheduler, worker and detokenizer).

    A port's descriptor tells only that something has changed since the port was looked at: look first, then wait.
    """

    def __init__(self, ports: Sequence[Port]) -> None:
        self._ports: list[Port] = []
        self._poll = select.poll()
        for port in ports:
            self.add(port)
        # A signal alone does not end the wait: it is taken up again for the time that was left.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll.register(self._wake_read, select.POLLIN)
        weakref.finalize(self, _close_both, self._wake_read, self._wake_write)

    def add(self, port: Port) -> None:
        """Starts watching a port."""
        self._ports.append(port)
        self._poll.register(port.file_descriptor, select.POLLIN)

    def remove(self, port: Port) -> None:
        """Stops watching a port; the caller closes it afterwards."""
        self._ports.remove(port)
        self._poll.unregister(port.file_descriptor)

    def interrupt(self) -> None:
        """Makes a waiting `receive_batch`, or else the next one, return at once. Safe in a signal handler."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups
            os.write(self._wake_write, b"!")

    def receive_batch(self, timeout_s: float) -> list[tuple[Port, Envelope]]:
        """What arrived, after waiting at most `timeout_s` for the first message; 0 does not wait.

        Empty when the time was up, or after `interrupt`.
        """
        deadline = time.monotonic() + timeout_s
        is_interrupted = False
        while True:
            batch = [(port, envelope) for port in self._ports for envelope in port.receive_ready()]
            left_ms = int(1000 * (deadline - time.monotonic()) + 0.999)
            if batch or left_ms <= 0 or is_interrupted:
                return batch
            for port in self._ports:
                if port.has_outbox:
                    left_ms = min(left_ms, _RETRY_MS)
            if (self._wake_read, select.POLLIN) in self._poll.poll(left_ms):
                os.read(self._wake_read, 4096)
                is_interrupted = True


def _close_both(read_end: int, write_end: int) -> None:
    os.close(read_end)
    os.close(write_end)


class AsyncReceiver:
    """Waits on ports from one asyncio task (the tokenizer's), without zmq.asyncio's per-message futures.

    ZeroMQ's file descriptor is edge-triggered: it must be drained after every wake-up, and an attempt to send can
    swallow the edge, so each one asks for another look.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._ports: list[Port] = []
        self._is_interrupted = False

    def add(self, port: Port) -> None:
        """Starts watching a port."""
        self._ports.append(port)
        self._loop.add_reader(port.file_descriptor, self._on_readable, port)
        port.look_again = self._wake.set
        self._wake.set()

    def remove(self, port: Port) -> None:
        """Stops watching a port; the caller closes it afterwards."""
        self._ports.remove(port)
        self._loop.remove_reader(port.file_descriptor)
        port.look_again = None

    def interrupt(self) -> None:
        """Makes a waiting `receive_batch`, or else the next one, return with what is there, perhaps nothing.

        Safe in a signal handler and from another thread.
        """
        self._is_interrupted = True
        self._loop.call_soon_threadsafe(self._wake.set)

    async def receive_batch(self, timeout_s: float) -> list[tuple[Port, Envelope]]:
        """What arrived, after waiting at most `timeout_s` for the first message. One task at a time may wait."""
        deadline = self._loop.time() + timeout_s
        await asyncio.sleep(0)  # a flood of messages must not keep the loop from everything else
        while True:
            self._wake.clear()
            batch = [(port, envelope) for port in self._ports for envelope in port.receive_ready()]
            left_s = deadline - self._loop.time()
            if batch or left_s <= 0 or self._is_interrupted:
                self._is_interrupted = False
                return batch
            if any(port.has_outbox for port in self._ports):
                left_s = min(left_s, _RETRY_MS / 1000)
            timer = self._loop.call_later(left_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()

    def _on_readable(self, port: Port) -> None:
        port.has_input()  # takes the edge, or the loop would spin on it until the next receive
        self._wake.set()
