"""gpu_worker: the network interface that has an address of this host."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_REQUEST_BYTES = 256
_NAME_BYTES = 15
_ADDRESS = slice(20, 24)


def interface_of(address: str) -> str | None:
    """The interface with an IPv4 address; None where there is none or the system cannot be asked (outside Linux)."""
    try:
        import fcntl  # not on every system
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:_NAME_BYTES])
            with suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[_ADDRESS]) == address:
                    return name
    return None
