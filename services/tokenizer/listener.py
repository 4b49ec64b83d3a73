"""Tokenizer process: the port, bound before anything slow is done."""

from __future__ import annotations

import socket

from services.runtime.listening import REUSED, SHARED, listen_addresses

SEND_BUFFER_BYTES = 128 * 1024  # what the kernel keeps for a client that does not read (Linux doubles it)


def bind_port(host: str, port: int) -> list[socket.socket]:
    """Binds every address of a host name; the sockets do not listen yet.

    With SO_REUSEPORT, so that the tokenizer processes of a group share one port and the kernel spreads connections. It
    lets in processes of the same user only, and whoever starts a group makes sure that the port is its own.

    Args:
        host: An address, a name, or "" for all addresses.
        port: 0 for a free one (the same for all addresses).

    Raises:
        StartError: the port is taken, may not be used, or the host is none of this machine.
    """
    options = [REUSED, SHARED, (socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)]  # connections inherit the last
    sockets: list[socket.socket] = []
    try:
        for address in listen_addresses(host, port):
            own_port = sockets[0].getsockname()[1] if sockets else port
            sockets.append(address.with_port(own_port).bind(options))
            sockets[-1].setblocking(False)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets
