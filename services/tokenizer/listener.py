"""Tokenizer process: the port, bound before anything slow is done."""

from __future__ import annotations

import errno
import socket

from services.runtime.service import StartError

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
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host, port):
            own_port = sockets[0].getsockname()[1] if sockets else port
            sockets.append(_bind(family, (address[0], own_port, *address[2:])))
    except OSError as error:
        for sock in sockets:
            sock.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"port {port} on {host} is in use by another process; choose one with --port") from error
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return sockets


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bind(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
