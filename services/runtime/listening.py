"""The addresses that a server listens on, and what is said when it cannot: for the launcher and for the tokenizer.

The launcher reserves the port before anything slow is done, the tokenizers bind it; both must look the host up and
refuse in the same way. What else a socket is for, its owner knows: the options are handed in.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from services.runtime.service import StartError

SHARED: tuple[int, int, int] = (socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
"""Lets in other processes of this user that set it too; the kernel spreads connections over them."""
REUSED: tuple[int, int, int] = (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
"""Closed connections may linger on the port."""


@dataclass(frozen=True)
class ListenAddress:
    """One address of a host that a stream socket can be bound to."""

    host: str
    """As it was given: for messages."""
    family: socket.AddressFamily
    address: tuple[object, ...]

    @property
    def port(self) -> int:
        """0 for a free one."""
        port = self.address[1]
        assert isinstance(port, int)
        return port

    def with_port(self, port: int) -> ListenAddress:
        """The same address with another port."""
        return ListenAddress(self.host, self.family, (self.address[0], port, *self.address[2:]))

    def bind(self, options: Sequence[tuple[int, int, int]]) -> socket.socket:
        """A bound socket that does not listen yet, with options (level, name, value) set before.

        Raises:
            StartError: the port is taken or may not be used, or the address is none of this machine.
        """
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        try:
            for level, name, value in options:
                sock.setsockopt(level, name, value)
            if self.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has a socket of its own
            sock.bind(self.address)
        except OSError as error:
            sock.close()
            raise self._refusal(error) from error
        return sock

    def _refusal(self, error: OSError) -> StartError:
        if error.errno == errno.EADDRINUSE:
            return StartError(f"port {self.port} on {self.host} is in use by another process; choose one with --port")
        return StartError(f"cannot listen on {self.host} port {self.port}: {error.strerror}")


def listen_addresses(host: str, port: int) -> list[ListenAddress]:
    """Every address of a host, in the order of the system's resolver, each once.

    Args:
        host: an address, a name, or "" for all addresses of this machine.
        port: 0 for a free one.

    Raises:
        StartError: the host is unknown.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise StartError(f"--host {host}: {reason}") from error
    return list(dict.fromkeys(ListenAddress(host, family, address) for family, _, _, _, address in found))
