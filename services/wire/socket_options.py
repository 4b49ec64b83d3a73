"""What all sockets between processes have in common: bounds, and how soon a peer that vanished is noticed."""

from __future__ import annotations

import zmq

from services.wire.endpoints import is_ipv6
from services.wire.forms import MAX_FRAME_BYTES

_HIGH_WATER_MARK = 512


def configured_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """A socket that is neither bound nor connected yet.

    Args:
        context: where it lives.
        kind: ROUTER or DEALER.
        endpoint: where it will be bound or connected.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, int(is_ipv6(endpoint)))
    # A peer whose host vanished keeps its routing id busy until TCP notices: about 10 s.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 4)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, 10_000)
    return socket
