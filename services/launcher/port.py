"""The port's reservation: taken before anything slow, held while the group runs.

Tokenizers share the port through SO_REUSEPORT, so they would also join the tokenizers of another server without an
error. A socket bound without that option is refused when anybody has the port; given the option afterwards it lets the
tokenizers in and keeps every later launcher out. It never listens, so no connection ever reaches it.
"""

from __future__ import annotations

import errno
import socket

from services.runtime.service import StartError


def reserve_port(host: str, port: int) -> socket.socket:
    """Binds a port so that only this user's processes that set SO_REUSEPORT can bind it too.

    Args:
        host: address or name to listen on.
        port: 0 for a free one; `getsockname()[1]` tells which.

    Raises:
        StartError: the port is taken, may not be used, or the host is none of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartError(f"--host {host}: {error.strerror}") from error
    reserved = socket.socket(family, kind, protocol)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger on it
        reserved.bind(address)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        reserved.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"port {port} on {host} is in use by another process; choose one with --port") from error
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return reserved
